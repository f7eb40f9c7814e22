/* A stand-in for NVIDIA's driver library, so that kvikio's real library runs its device path where
 * there is no GPU. "Device" memory is host memory that emulated_device_memory() has declared to be.
 * Only what kvikio calls is here. It is loaded in a subprocess of a test and proves how our code
 * uses kvikio, not how GPUs behave. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef int result;
typedef unsigned long long device_pointer;
enum { SUCCESS = 0, INVALID_VALUE = 1 };
enum { CONTEXT = 1, MEMORY_TYPE = 2, DEVICE_POINTER = 3, HOST_POINTER = 4, DEVICE_ORDINAL = 9 };

static char a_context, a_stream, an_event;
static device_pointer device_start, device_end;
static long num_copies;

void emulated_device_memory(device_pointer start, size_t size) {
  device_start = start;
  device_end = start + size;
}
long emulated_copies(void) { return num_copies; }
static int is_device(device_pointer p) { return p >= device_start && p < device_end; }

result cuInit(unsigned flags) { (void)flags; return SUCCESS; }
result cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
result cuDeviceGet(int *device, int ordinal) { *device = ordinal; return SUCCESS; }
result cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
result cuDeviceGetAttribute(int *value, int which, int device) {
  (void)which; (void)device; *value = 0; return SUCCESS;
}
result cuDevicePrimaryCtxRetain(void **context, int device) {
  (void)device; *context = &a_context; return SUCCESS;
}
result cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return SUCCESS; }
result cuCtxCreate_v2(void **context, unsigned flags, int device) {
  (void)flags; (void)device; *context = &a_context; return SUCCESS;
}
result cuCtxCreate_v4(void **context, void *parameters, unsigned flags, int device) {
  (void)parameters; return cuCtxCreate_v2(context, flags, device);
}
result cuCtxDestroy_v2(void *context) { (void)context; return SUCCESS; }
result cuCtxPushCurrent_v2(void *context) { (void)context; return SUCCESS; }
result cuCtxPopCurrent_v2(void **context) { *context = &a_context; return SUCCESS; }
result cuCtxGetCurrent(void **context) { *context = &a_context; return SUCCESS; }
result cuCtxSetCurrent(void *context) { (void)context; return SUCCESS; }
result cuCtxGetDevice(int *device) { *device = 0; return SUCCESS; }
result cuCtxGetDevice_v2(int *device, void *context) { (void)context; *device = 0; return SUCCESS; }
result cuCtxSynchronize(void) { return SUCCESS; }
result cuGetErrorName(result code, const char **text) {
  (void)code; *text = "EMULATED"; return SUCCESS;
}
result cuGetErrorString(result code, const char **text) {
  (void)code; *text = "emulated driver error"; return SUCCESS;
}
result cuPointerGetAttribute(void *value, int which, device_pointer p) {
  switch (which) {
    case CONTEXT: *(void **)value = is_device(p) ? &a_context : NULL; break;
    case MEMORY_TYPE: *(unsigned *)value = is_device(p) ? 2 : 0; break;
    case DEVICE_POINTER: *(device_pointer *)value = p; break;
    case HOST_POINTER: *(device_pointer *)value = p; break;
    case DEVICE_ORDINAL: *(int *)value = is_device(p) ? 0 : -2; break;
    default: *(int *)value = 0;
  }
  return is_device(p) || which == MEMORY_TYPE || which == DEVICE_ORDINAL ? SUCCESS : INVALID_VALUE;
}
result cuPointerGetAttributes(unsigned count, int *which, void **values, device_pointer p) {
  for (unsigned i = 0; i < count; i++) cuPointerGetAttribute(values[i], which[i], p);
  return SUCCESS;
}
result cuMemGetAddressRange_v2(device_pointer *base, size_t *size, device_pointer p) {
  if (!is_device(p)) return INVALID_VALUE;
  *base = device_start;
  *size = device_end - device_start;
  return SUCCESS;
}
result cuMemHostAlloc(void **memory, size_t size, unsigned flags) {
  (void)flags; return posix_memalign(memory, 4096, size) ? 2 : SUCCESS;
}
result cuMemFreeHost(void *memory) { free(memory); return SUCCESS; }
result cuMemHostRegister_v2(void *p, size_t n, unsigned f) { (void)p; (void)n; (void)f; return 0; }
result cuMemHostUnregister(void *p) { (void)p; return SUCCESS; }
static result copy(void *to, const void *from, size_t size) {
  __sync_fetch_and_add(&num_copies, 1);
  memcpy(to, from, size);
  return SUCCESS;
}
result cuMemcpyHtoDAsync_v2(device_pointer to, const void *from, size_t size, void *stream) {
  (void)stream; return copy((void *)to, from, size);
}
result cuMemcpyDtoHAsync_v2(void *to, device_pointer from, size_t size, void *stream) {
  (void)stream; return copy(to, (const void *)from, size);
}
result cuMemcpyAsync(device_pointer to, device_pointer from, size_t size, void *stream) {
  (void)stream; return copy((void *)to, (const void *)from, size);
}
result cuMemcpyBatchAsync(void **to, void **from, size_t *sizes, size_t count, void *attributes,
                          size_t *attribute_starts, size_t num_attributes, size_t *failed,
                          void *stream) {
  (void)attributes; (void)attribute_starts; (void)num_attributes; (void)failed; (void)stream;
  for (size_t i = 0; i < count; i++) copy(to[i], from[i], sizes[i]);
  return SUCCESS;
}
result cuMemcpyBatchAsync_v2(void **to, void **from, size_t *sizes, size_t count, void *attributes,
                             size_t *attribute_starts, size_t num_attributes, void *stream) {
  return cuMemcpyBatchAsync(to, from, sizes, count, attributes, attribute_starts, num_attributes,
                            NULL, stream);
}
result cuStreamCreate(void **stream, unsigned flags) {
  (void)flags; *stream = &a_stream; return SUCCESS;
}
result cuStreamDestroy_v2(void *stream) { (void)stream; return SUCCESS; }
result cuStreamSynchronize(void *stream) { (void)stream; return SUCCESS; }
result cuStreamQuery(void *stream) { (void)stream; return SUCCESS; }
result cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
  (void)stream; (void)event; (void)flags; return SUCCESS;
}
result cuStreamGetCtx(void *stream, void **context) {
  (void)stream; *context = &a_context; return SUCCESS;
}
result cuLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
  (void)stream; function(data); return SUCCESS;
}
result cuEventCreate(void **event, unsigned flags) {
  (void)flags; *event = &an_event; return SUCCESS;
}
result cuEventDestroy_v2(void *event) { (void)event; return SUCCESS; }
result cuEventRecord(void *event, void *stream) { (void)event; (void)stream; return SUCCESS; }
result cuEventQuery(void *event) { (void)event; return SUCCESS; }
result cuEventSynchronize(void *event) { (void)event; return SUCCESS; }
