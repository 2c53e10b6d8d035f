/* SPDX-License-Identifier: Apache-2.0 */
/* Functions that programs take from glibc and that version 2.28 does not have (old_linux.py). */
#include <fcntl.h>
#include <sys/stat.h>

/* 2.32. A promise that there is one thread; 0 never promises it. */
char __libc_single_threaded = 0;

/* 2.33. Until then these were inline functions around others. */
int __xstat(int, const char*, struct stat*);
int __lxstat(int, const char*, struct stat*);
int __fxstat(int, int, struct stat*);
int __fxstatat(int, int, const char*, struct stat*, int);
enum { kVersion = 1 };

int stat(const char* path, struct stat* out) { return __xstat(kVersion, path, out); }
int lstat(const char* path, struct stat* out) { return __lxstat(kVersion, path, out); }
int fstat(int file, struct stat* out) { return __fxstat(kVersion, file, out); }
int fstatat(int at, const char* path, struct stat* out, int flags) {
  return __fxstatat(kVersion, at, path, out, flags);
}

/* 2.34 runs the constructors of a program by itself; before, the program passed a function that
 * does. */
typedef void (*Constructor)(int, char**, char**);
extern Constructor __init_array_start[] __attribute__((weak, visibility("hidden")));
extern Constructor __init_array_end[] __attribute__((weak, visibility("hidden")));

static void construct(int argc, char** argv, char** environment) {
  for (Constructor* c = __init_array_start; c != __init_array_end; ++c)
    (*c)(argc, argv, environment);
}

int __real___libc_start_main(int (*)(int, char**, char**), int, char**, Constructor, void (*)(void),
                             void (*)(void), void*) __attribute__((weak));

int __wrap___libc_start_main(int (*main)(int, char**, char**), int argc, char** argv,
                             Constructor init, void (*fini)(void), void (*rtld_fini)(void),
                             void* stack_end) {
  (void)init;
  return __real___libc_start_main(main, argc, argv, construct, fini, rtld_fini, stack_end);
}
