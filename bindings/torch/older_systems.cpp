// For wheels (TILEWISE_OLDER_SYSTEMS): lets a binary that is linked on a new system run on older ones, down
// to glibc 2.28 and the libstdc++ of GCC 8 (manylinux_2_28).
//
// A linker binds each symbol to its newest version. glibc 2.34 gave new versions to everything that came from
// libpthread, libdl and librt, and glibc 2.29 to exp and log. The older versions still exist and do the same.
// For each name below there is a hidden function in this library that jumps to the older version. It jumps
// and does not call, so that dlopen and dlsym still see the address of their caller.

#include <sys/stat.h>

#include <new>
#include <sstream>

#if !defined(__x86_64__) || !defined(__linux__)
#error "older_systems.cpp knows the symbol versions of 64-bit x86 Linux alone"
#endif

__asm__(R"(
.macro older name, version=GLIBC_2.2.5
  .symver older_\name, \name@\version
  .text
  .globl \name
  .hidden \name
  .type \name, @function
\name:
  jmp *older_\name@GOTPCREL(%rip)
  .size \name, . - \name
.endm

older exp
older log
older pthread_once
)"
#ifdef TILEWISE_HAS_CUDA  // the functions that the static CUDA runtime calls
        R"(
.irp name, dlclose, dlerror, dlopen, dlsym, dlvsym
  older \name
.endr
older dlmopen, GLIBC_2.3.4
.irp name, create, detach, getspecific, join, key_create, key_delete, kill, setspecific
  older pthread_\name
.endr
.irp name, condattr_setpshared, mutex_trylock
  older pthread_\name
.endr
.irp name, destroy, init, setpshared, settype
  older pthread_mutexattr_\name
.endr
.irp name, destroy, init, rdlock, timedrdlock, timedwrlock, tryrdlock, trywrlock, unlock, wrlock
  older pthread_rwlock_\name
.endr
.irp name, destroy, init, setpshared
  older pthread_rwlockattr_\name
.endr
.irp name, destroy, init, lock, trylock, unlock
  older pthread_spin_\name
.endr
.irp name, destroy, init, post, timedwait, trywait, wait
  older sem_\name
.endr
older shm_open
older shm_unlink
)"
#endif
        R"(
.section .rodata
.globl __libc_single_threaded
.hidden __libc_single_threaded
.type __libc_single_threaded, @object
.size __libc_single_threaded, 1
__libc_single_threaded: .byte 0
.text
)");
// __libc_single_threaded, of glibc 2.32, says whether the process has a single thread, in which case
// shared_ptr counts without atomics. 0 is always correct.

// fstat is a function since glibc 2.33. Before, a header called __fxstat with the version of struct stat's
// layout, of which x86-64 has only one.
extern "C" int __fxstat(int layout, int file, struct stat* facts) noexcept;
extern "C" int fstat(int file, struct stat* facts) noexcept { return __fxstat(1, file, facts); }

// Members of streams and strings that libstdc++ exports since GCC 9, 11 and 13. Here they are instantiated
// from their templates.
namespace std {
template basic_stringstream<char>::basic_stringstream();
template basic_ostringstream<char>::basic_ostringstream();
template string basic_stringbuf<char>::str() const&;
template string basic_stringbuf<char>::str() &&;

void __throw_bad_array_new_length() { throw bad_array_new_length(); }  // exports.map hides it

#if _GLIBCXX_RELEASE >= 13
template void string::_M_replace_cold(char*, size_t, const char*, size_t, size_t);
// Since GCC 13 libstdc++ makes cout and its like, and <iostream> only refers to this function, which is never
// called. Before, every user of <iostream> made sure that they were there.
void ios_base_library_init() {}
static ios_base::Init streams __attribute__((init_priority(101)));
#endif
}  // namespace std
