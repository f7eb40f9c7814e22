// PyTorch's allocator for CPU tensors, the large ones from a pool (page_pool.cpp, compiled before).
//
// Compiled by Inductor's own toolchain, see allocator.py. Where nothing that is free is long enough,
// Python makes a block; only for threads that Python knows: another one, of OpenMP say, would have
// to wait for the interpreter's lock, which may be held by who waits for that thread.

#include <Python.h>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <atomic>

namespace {

PyObject* make = nullptr;  // Called with bytes: True if there is a block of so many now.
std::atomic<Pool*> serving{nullptr};
constexpr size_t FEW_UNITS = 4;
size_t least_nbytes = 0, unit_nbytes = 1;
c10::Allocator* torch_allocator = nullptr;

// An exception cannot leave through PyTorch. What a signal's handler has raised (Ctrl-C) is raised
// anew as soon as the interpreter runs Python again.
PyObject* kept = nullptr;

int raise_kept(void*) {
  PyObject* const error = kept;
  kept = nullptr;
  if (!error) return 0;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
  Py_DECREF(error);
  return -1;
}

void keep_exception() {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  Py_XSETREF(kept, value);
  Py_AddPendingCall(&raise_kept, nullptr);
}

// True if there is a block of `nbytes` now that can be taken.
bool ask(size_t nbytes) {
  const PyGILState_STATE state = PyGILState_Ensure();
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  bool made = false;
  if (serving) {
    PyObject* const called = Py_NewRef(make);  // it may be replaced meanwhile
    PyObject* const answer = PyObject_CallFunction(called, "n", static_cast<Py_ssize_t>(nbytes));
    Py_DECREF(called);
    if (!answer) keep_exception();
    made = answer == Py_True;
    Py_XDECREF(answer);
  }
  PyErr_Restore(type, value, traceback);
  PyGILState_Release(state);
  return made;
}

void give_back(void* address) {
  if (!free_block(reinterpret_cast<size_t>(address))) torch_allocator->raw_deleter()(address);
}

// Whole units, or pages where that would be much more than what is asked for.
size_t rounded(size_t nbytes) {
  const size_t unit = nbytes < FEW_UNITS * unit_nbytes ? PAGE_NBYTES : unit_nbytes;
  return (nbytes + unit - 1) / unit * unit;
}

void* from_pool(size_t nbytes) {
  Pool* const pool = serving;
  if (!pool || nbytes < least_nbytes) return nullptr;
  nbytes = rounded(nbytes);
  size_t address = take_block(pool, nbytes);
  if (!address && PyGILState_GetThisThreadState() && ask(nbytes)) address = take_block(pool, nbytes);
  return reinterpret_cast<void*>(address);
}

struct PoolAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* const address = from_pool(nbytes);
    if (!address) return torch_allocator->allocate(nbytes);
    return {address, address, &give_back, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    default_copy_data(target, source, nbytes);
  }
};

}  // namespace

extern "C" {

// Put this allocator in the place of PyTorch's, once; it does the same until it serves. Tensors of
// `least` bytes and more get a multiple of `unit`; of pages, where that would be few units. False
// if another allocator stays.
bool install(size_t least, size_t unit) {
  least_nbytes = least;
  unit_nbytes = unit;
  torch_allocator = c10::GetCPUAllocator();
  auto* const allocator = new PoolAllocator;
  c10::SetCPUAllocator(allocator, /*priority=*/1);
  if (c10::GetCPUAllocator() != allocator) return false;
  pthread_atfork(
      [] { guard.lock(); },
      [] { guard.unlock(); },
      [] {
        serving = nullptr;
        for (Pool* pool : pools) pool->forget_taken();  // it is the parent's
        guard.unlock();
      });
  return true;
}

// From now on large tensors have their memory from `pool`, which has new blocks from `from`; from
// PyTorch if it is null.
void serve(Pool* pool, PyObject* from) {
  serving = pool;
  Py_INCREF(from);
  Py_XSETREF(make, from);
}

}  // extern "C"
