// Makes the n-th system call of a process, or of a tree of processes, go wrong. Preloaded
// (LD_PRELOAD); the block of memory that says what goes wrong is a file, named by
// ODTPACK_FAULTS, which all processes share. Only calls on files below a folder count.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { READ = 1, WRITE = 2, OPEN = 4, RENAME = 8, SYNC = 16, MAP = 32, REMOVE = 64, MAKE = 128,
       ALLOCATE = 256, CHANGE = 512, CLOCK = 1024, LINK = 2048 };
enum { FAIL = 1, KILL = 2, SHORT = 3, TEAR = 4, DELAY = 5 };

// The same fields, in the same order, as in inject.py.
struct control {
  int64_t armed, kinds, at, mode, error, sticky, counter, hits, large;
  char root[1024];
};

static struct control* control;
static unsigned char tracked[65536];

__attribute__((constructor)) static void start(void) {
  const char* name = getenv("ODTPACK_FAULTS");
  int fd = name ? open(name, O_RDWR) : -1;
  if (fd < 0) return;
  void* block = mmap(0, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (block != MAP_FAILED) control = block;
}

#define REAL(name, ...) \
  static __typeof__(&name) real; \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static int hit(int kind) {
  struct control* c = control;
  if (!c || !c->armed || !(c->kinds & kind)) return 0;
  int64_t n = __atomic_add_fetch(&c->counter, 1, __ATOMIC_SEQ_CST);
  if (c->at == 0 || (c->sticky ? n < c->at : n != c->at)) return 0;
  __atomic_add_fetch(&c->hits, 1, __ATOMIC_SEQ_CST);
  if (c->mode == KILL) kill(getpid(), SIGKILL);
  if (c->mode == DELAY) {
    struct timespec pause = {0, 50 * 1000 * 1000};
    nanosleep(&pause, 0);
    return 0;
  }
  errno = (int)c->error;
  return (int)c->mode;
}

static int below(const char* path) {
  if (!control || !control->armed || !path) return 0;
  size_t length = strlen(control->root);
  if (path[0] == '/') return strncmp(path, control->root, length) == 0;
  char here[1024];
  return getcwd(here, sizeof here) && strncmp(here, control->root, length) == 0;
}

static int on(int fd) { return fd >= 0 && fd < 65536 && tracked[fd]; }

#define FAILS(condition, kind) ((condition) && hit(kind) == FAIL)

static int opened(int fd, const char* path) {
  if (fd >= 0 && fd < 65536) tracked[fd] = (unsigned char)below(path);
  return fd;
}

#define OPENS(name) \
  int name(const char* path, int flags, ...) { \
    REAL(name); \
    va_list rest; \
    va_start(rest, flags); \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest); \
    if (FAILS(below(path), OPEN)) return -1; \
    return opened(real(path, flags, mode), path); \
  }
OPENS(open)
OPENS(open64)

#define OPENS_AT(name) \
  int name(int folder, const char* path, int flags, ...) { \
    REAL(name); \
    va_list rest; \
    va_start(rest, flags); \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest); \
    if (FAILS(below(path), OPEN)) return -1; \
    return opened(real(folder, path, flags, mode), path); \
  }
OPENS_AT(openat)
OPENS_AT(openat64)

int close(int fd) {
  REAL(close);
  if (fd >= 0 && fd < 65536) tracked[fd] = 0;
  return real(fd);
}

ssize_t read(int fd, void* buffer, size_t size) {
  REAL(read);
  int mode = on(fd) ? hit(READ) : 0;
  if (mode == FAIL) return -1;
  return real(fd, buffer, mode == SHORT && size > 1 ? size / 2 : size);
}

#define PREADS(name, offset_type) \
  ssize_t name(int fd, void* buffer, size_t size, offset_type offset) { \
    REAL(name); \
    int mode = on(fd) ? hit(READ) : 0; \
    if (mode == FAIL) return -1; \
    return real(fd, buffer, mode == SHORT && size > 1 ? size / 2 : size, offset); \
  }
PREADS(pread, off_t)
PREADS(pread64, off64_t)

ssize_t write(int fd, const void* buffer, size_t size) {
  REAL(write);
  int mode = on(fd) ? hit(WRITE) : 0;
  if (mode == FAIL) return -1;
  ssize_t done = real(fd, buffer, (mode == SHORT || mode == TEAR) && size > 1 ? size / 2 : size);
  if (mode == TEAR) kill(getpid(), SIGKILL);
  return done;
}

#define PWRITES(name, offset_type) \
  ssize_t name(int fd, const void* buffer, size_t size, offset_type offset) { \
    REAL(name); \
    int mode = on(fd) ? hit(WRITE) : 0; \
    if (mode == FAIL) return -1; \
    size_t part = (mode == SHORT || mode == TEAR) && size > 1 ? size / 2 : size; \
    ssize_t done = real(fd, buffer, part, offset); \
    if (mode == TEAR) kill(getpid(), SIGKILL); \
    return done; \
  }
PWRITES(pwrite, off_t)
PWRITES(pwrite64, off64_t)

ssize_t writev(int fd, const struct iovec* parts, int count) {
  REAL(writev);
  if (FAILS(on(fd), WRITE)) return -1;
  return real(fd, parts, count);
}

#define ON_FILE(name, kind, ...) \
  int name(int fd) { \
    REAL(name); \
    return FAILS(on(fd), kind) ? -1 : real(fd); \
  }
ON_FILE(fsync, SYNC)
ON_FILE(fdatasync, SYNC)

int ftruncate(int fd, off_t size) {
  REAL(ftruncate);
  return FAILS(on(fd), CHANGE) ? -1 : real(fd, size);
}

int ftruncate64(int fd, off64_t size) {
  REAL(ftruncate64);
  return FAILS(on(fd), CHANGE) ? -1 : real(fd, size);
}

#define ON_PATH(name, kind) \
  int name(const char* path) { \
    REAL(name); \
    return FAILS(below(path), kind) ? -1 : real(path); \
  }
ON_PATH(unlink, REMOVE)
ON_PATH(rmdir, REMOVE)

int unlinkat(int folder, const char* path, int flags) {
  REAL(unlinkat);
  // A name relative to an open folder: shutil.rmtree removes so.
  return FAILS(below(path) || on(folder), REMOVE) ? -1 : real(folder, path, flags);
}

int mkdir(const char* path, mode_t mode) {
  REAL(mkdir);
  return FAILS(below(path), MAKE) ? -1 : real(path, mode);
}

int chmod(const char* path, mode_t mode) {
  REAL(chmod);
  return FAILS(below(path), CHANGE) ? -1 : real(path, mode);
}

#define PAIRS(name, kind) \
  int name(const char* old, const char* new) { \
    REAL(name); \
    return FAILS(below(new), kind) ? -1 : real(old, new); \
  }
PAIRS(rename, RENAME)
PAIRS(link, LINK)

int linkat(int from, const char* old, int to, const char* new, int flags) {
  REAL(linkat);
  return FAILS(below(new), LINK) ? -1 : real(from, old, to, new, flags);
}

int renameat(int from, const char* old, int to, const char* new) {
  REAL(renameat);
  return FAILS(below(new), RENAME) ? -1 : real(from, old, to, new);
}

int renameat2(int from, const char* old, int to, const char* new, unsigned flags) {
  REAL(renameat2);
  return FAILS(below(new), RENAME) ? -1 : real(from, old, to, new, flags);
}

#define MAPS(name, offset_type) \
  void* name(void* at, size_t size, int protection, int flags, int fd, offset_type offset) { \
    REAL(name); \
    int counts = flags & MAP_ANONYMOUS ? control && (int64_t)size >= control->large : on(fd); \
    if (FAILS(counts, flags & MAP_ANONYMOUS ? ALLOCATE : MAP)) return MAP_FAILED; \
    return real(at, size, protection, flags, fd, offset); \
  }
MAPS(mmap, off_t)
MAPS(mmap64, off64_t)

// glibc's own names, because dlsym allocates.
extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);

static int no_room(size_t size) {
  if (!control || !control->armed || (int64_t)size < control->large) return 0;
  if (hit(ALLOCATE) != FAIL) return 0;
  errno = ENOMEM;
  return 1;
}

void* malloc(size_t size) { return no_room(size) ? 0 : __libc_malloc(size); }
void* calloc(size_t count, size_t size) {
  return no_room(size * count) ? 0 : __libc_calloc(count, size);
}
void* realloc(void* old, size_t size) { return no_room(size) ? 0 : __libc_realloc(old, size); }
void* memalign(size_t to, size_t size) { return no_room(size) ? 0 : __libc_memalign(to, size); }
void* aligned_alloc(size_t to, size_t size) {
  return no_room(size) ? 0 : __libc_memalign(to, size);
}
int posix_memalign(void** found, size_t to, size_t size) {
  if (no_room(size)) return ENOMEM;
  *found = __libc_memalign(to, size);
  return *found ? 0 : ENOMEM;
}

int clock_gettime(clockid_t clock, struct timespec* now) {
  REAL(clock_gettime);
  int code = real(clock, now);
  // Nine hours back: what a phone's clock does that was set by hand.
  if (clock == CLOCK_REALTIME && hit(CLOCK) == FAIL && code == 0) now->tv_sec -= 9 * 3600;
  return code;
}
