#pragma once

/// Declares `name`, an array of T: the dynamic shared memory, whose size the launch gives.
#ifdef TILEWISE_EMULATOR
#include "emulator.h"
#define TILEWISE_DYNAMIC_SHARED(T, name, alignment) \
  T* const name = reinterpret_cast<T*>(::tilewise::emulator::dynamic_shared())
#else
#define TILEWISE_DYNAMIC_SHARED(T, name, alignment) \
  extern __shared__ __align__(alignment)            \
  T name[]
#endif
