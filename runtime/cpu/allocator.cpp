// PyTorch's allocator for CPU tensors, the large ones from a pool that Python keeps.
//
//     freed -> the list -> the next tensor of just this size
//                       -> the pool takes it back, joins it with what is free beside it
//
// Compiled by Inductor's own toolchain, see cpu_allocator.py. What the list has needs no lock of
// Python. Only threads that Python knows ask the pool: another one, of OpenMP say, would have to
// wait for the interpreter's lock, which may be held by who waits for that thread.

#include <Python.h>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

struct Block {
  void* address;
  size_t nbytes;
};

struct Loan {
  size_t nbytes;
  unsigned term;
};

PyObject* take = nullptr;  // From bytes to an address, or None.
std::atomic<bool> serves{false};
std::atomic<unsigned> term{0};  // How often serving has ended: no pool wants what is from before.
constexpr size_t FEW_UNITS = 4;
size_t least_nbytes = 0, unit_nbytes = 1, page_nbytes = 1;
c10::Allocator* torch_allocator = nullptr;

// Never destroyed: tensors may be freed when the process ends.
std::mutex& guard = *new std::mutex;
std::unordered_map<void*, Loan>& taken = *new std::unordered_map<void*, Loan>;
std::vector<Block>& returned = *new std::vector<Block>;
std::atomic<size_t> returned_nbytes{0};  // Of the list, and of what is in hand.
Block in_hand{nullptr, 0};  // On its way from the list to its pool.

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

// A block of `nbytes` that has been freed, the last one: it is the warmest.
void* reuse(size_t nbytes) {
  const std::lock_guard<std::mutex> lock(guard);
  for (auto at = returned.rbegin(); at != returned.rend(); ++at) {
    if (at->nbytes == nbytes) {
      void* const address = at->address;
      returned.erase(std::next(at).base());
      returned_nbytes -= nbytes;
      taken[address] = {nbytes, term};
      return address;
    }
  }
  return nullptr;
}

void* ask(size_t nbytes) {
  const PyGILState_STATE state = PyGILState_Ensure();
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  void* address = nullptr;
  if (serves) {
    PyObject* const called = Py_NewRef(take);  // it may be replaced meanwhile
    PyObject* const found = PyObject_CallFunction(called, "n", static_cast<Py_ssize_t>(nbytes));
    Py_DECREF(called);
    if (!found) {
      keep_exception();
    } else if (found != Py_None) {
      address = PyLong_AsVoidPtr(found);
    }
    Py_XDECREF(found);
  }
  PyErr_Restore(type, value, traceback);
  PyGILState_Release(state);
  return address;
}

void free_block(void* address) {
  size_t nbytes = 0;
  {
    const std::lock_guard<std::mutex> lock(guard);
    const auto found = taken.find(address);
    if (found != taken.end()) {
      const bool wanted = serves && found->second.term == term;
      nbytes = found->second.nbytes;
      taken.erase(found);
      if (wanted) {
        returned.push_back({address, nbytes});
        returned_nbytes += nbytes;
        return;
      }
    }
  }
  if (nbytes) {
    munmap(address, nbytes);
  } else {
    torch_allocator->raw_deleter()(address);
  }
}

// Whole units, or pages where that would be much more than what is asked for.
size_t rounded(size_t nbytes) {
  const size_t unit = nbytes < FEW_UNITS * unit_nbytes ? page_nbytes : unit_nbytes;
  return (nbytes + unit - 1) / unit * unit;
}

void* from_pool(size_t nbytes) {
  nbytes = rounded(nbytes);
  void* address = reuse(nbytes);
  if (!address && PyGILState_GetThisThreadState()) {
    if ((address = ask(nbytes))) {
      const std::lock_guard<std::mutex> lock(guard);
      taken[address] = {nbytes, term};
    }
  }
  return address;
}

struct PoolAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* const address = serves && nbytes >= least_nbytes ? from_pool(nbytes) : nullptr;
    if (!address) return torch_allocator->allocate(nbytes);
    return {address, address, &free_block, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    default_copy_data(target, source, nbytes);
  }
};

}  // namespace

extern "C" {

// Put this allocator in the place of PyTorch's, once; it does the same until it serves. What a pool
// gives for tensors of `least` bytes and more is a multiple of `unit`; of `page`, where that would
// be few units. False if another one stays.
bool install(size_t least, size_t unit, size_t page) {
  least_nbytes = least;
  unit_nbytes = unit;
  page_nbytes = page;
  torch_allocator = c10::GetCPUAllocator();
  auto* const allocator = new PoolAllocator;
  c10::SetCPUAllocator(allocator, /*priority=*/1);
  if (c10::GetCPUAllocator() != allocator) return false;
  pthread_atfork(
      [] { guard.lock(); },
      [] { guard.unlock(); },
      [] {
        serves = false;  // the pool is the parent's
        ++term;
        guard.unlock();
      });
  return true;
}

// From now on large tensors have their memory from `from`; None: from PyTorch.
void serve(PyObject* from) {
  serves = from != Py_None;
  term += !serves;
  Py_INCREF(from);
  Py_XSETREF(take, from);
}

// A block of the list, which from now on is in the caller's hand; false if there is none. What has
// been left there comes again.
bool last_returned(Block* block) {
  const std::lock_guard<std::mutex> lock(guard);
  if (!in_hand.address && !returned.empty()) {
    in_hand = returned.back();
    returned.pop_back();
  }
  *block = in_hand;
  return in_hand.address;
}

// It is where it belongs.
void forget_returned(const Block* block) {
  const std::lock_guard<std::mutex> lock(guard);
  if (in_hand.address != block->address) return;
  returned_nbytes -= in_hand.nbytes;
  in_hand = {nullptr, 0};
}

// Of the list, and of what is in the caller's hand.
size_t num_returned_bytes() { return returned_nbytes; }

}  // extern "C"
