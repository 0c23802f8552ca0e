// A Vulkan driver in front of another one (DRIVER), which counts the bytes of storage buffers.
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef void (*Function)(void);
typedef Function (*Find)(void *, const char *);
typedef struct { uint32_t type; const void *next; uint32_t flags; uint64_t size; uint32_t usage; } Info;
typedef int (*Create)(void *, const Info *, const void *, uint64_t *);
typedef void (*Destroy)(void *, uint64_t, const void *);

enum { STORAGE = 0x20, MOST = 1 << 16 };
static Find find_instance, find_device;
static Create create;
static Destroy destroy;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct { uint64_t buffer, size; } held[MOST];
static uint64_t total;

static int counted_create(void *device, const Info *info, const void *pool, uint64_t *buffer) {
  int failed = create(device, info, pool, buffer);
  if (failed || !(info->usage & STORAGE)) return failed;
  pthread_mutex_lock(&lock);
  int i = 0;
  while (i < MOST && held[i].buffer) i++;
  if (i == MOST) abort();
  held[i].buffer = *buffer, held[i].size = info->size;
  total += info->size;
  pthread_mutex_unlock(&lock);
  return 0;
}

static void counted_destroy(void *device, uint64_t buffer, const void *pool) {
  pthread_mutex_lock(&lock);
  for (int i = 0; buffer && i < MOST; i++)
    if (held[i].buffer == buffer) total -= held[i].size, held[i].buffer = 0;
  pthread_mutex_unlock(&lock);
  destroy(device, buffer, pool);
}

static Function counted(const char *name, Function found) {
  if (!strcmp(name, "vkCreateBuffer")) return create = (Create)found, (Function)counted_create;
  if (!strcmp(name, "vkDestroyBuffer")) return destroy = (Destroy)found, (Function)counted_destroy;
  return found;
}

static Function of_device(void *device, const char *name) { return counted(name, find_device(device, name)); }

static void *driver(const char *name) {
  static void *library;
  if (!library) library = dlopen(getenv("DRIVER"), RTLD_NOW);
  return dlsym(library, name);
}

Function vk_icdGetInstanceProcAddr(void *instance, const char *name) {
  if (!find_instance) find_instance = (Find)driver("vk_icdGetInstanceProcAddr");
  Function found = find_instance(instance, name);
  if (!found || strcmp(name, "vkGetDeviceProcAddr")) return found;
  return find_device = (Find)found, (Function)of_device;
}

Function vk_icdGetPhysicalDeviceProcAddr(void *instance, const char *name) {
  return ((Find)driver("vk_icdGetPhysicalDeviceProcAddr"))(instance, name);
}

int vk_icdNegotiateLoaderICDInterfaceVersion(uint32_t *version) {
  return ((int (*)(uint32_t *))driver("vk_icdNegotiateLoaderICDInterfaceVersion"))(version);
}

uint64_t storage_bytes(void) { return total; }
