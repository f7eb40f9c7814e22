// Lets a tensor raise where its bytes are looked at, which PyTorch has an interface for in C++ alone.
//
// Compiled by Inductor's own toolchain, see storage_pointers.py.

#include <c10/core/StorageImpl.h>

#include <string>

extern "C" void let_raise(void* storage, const char* message) {
  // What it is called for is not done there: the storage keeps its pointer, which is nobody's.
  static_cast<c10::StorageImpl*>(storage)->release_data_and_set_meta_custom_data_ptr_error_msg_(
      std::string(message));
}
