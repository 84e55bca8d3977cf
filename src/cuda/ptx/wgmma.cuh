#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace tilewise::cuda {

// Tensor cores by wgmma (sm_90a): asynchronous products of a warpgroup, of tiles in shared memory. The
// accumulator c is 64 x n in f32; warp w of the four has rows 16w to 16w + 15. With g = lane / 4 and t = lane
// % 4, a lane holds c[4j], c[4j + 1] = (g, 8j + 2t), (g, 8j + 2t + 1), and c[4j + 2], c[4j + 3] = the same of
// row g + 8.
//
// A tile in shared memory consists of panels of 64 columns: rows of 128 bytes, in which the index of a
// 16-byte chunk is exclusive-ored with the row's number (TMA's swizzle of 128 bytes). A panel starts at a
// multiple of 1024 bytes. Either dimension of a tile may be K.

/// wgmma's descriptor of a tile. Offsets inside the tile are added to it in units of 16 bytes.
using TileDescriptor = std::uint64_t;

/// `panel_bytes` is the distance between panels; it matters only if an instruction reads several panels.
__device__ __forceinline__ TileDescriptor describe_tile(std::uint32_t address_smem, int panel_bytes) {
  constexpr TileDescriptor swizzle_128 = TileDescriptor{1} << 62;
  constexpr TileDescriptor eight_rows = TileDescriptor{1024 / 16} << 32;
  return swizzle_128 | eight_rows | static_cast<TileDescriptor>(panel_bytes / 16) << 16 |
         (address_smem & 0x3FFFF) >> 4;
}

/// Orders earlier accesses to registers, by other instructions, before products that read or accumulate in
/// them.
__device__ __forceinline__ void fence_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
/// Commits the products since the last commit as a group.
__device__ __forceinline__ void commit_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
/// Waits until at most `groups` groups are in flight. Registers of the completed ones may be used then.
template <int groups>
__device__ __forceinline__ void wait_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
#endif
}

/// Keeps the compiler from moving accesses to these registers across a fence or a wait.
template <int n>
__device__ __forceinline__ void pin(float (&registers)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int m, int n>
__device__ __forceinline__ void pin(std::uint32_t (&registers)[m][n]) {
#pragma unroll
  for (int i = 0; i < m * n; ++i) asm volatile("" : "+r"(registers[i / n][i % n])::"memory");
}

/// Tells the compiler that the registers' values are not needed: a product that starts anew does not read
/// them.
template <int n>
__device__ __forceinline__ void forget(float (&registers)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "=f"(registers[i]));
}

/// The instructions for an accumulator c of n columns and K = 16, by the type of a and b.
///   from_shared: c = a·b, or c += a·b if `add`. Operands are K-major, or MN-major if transposed_a or
///   transposed_b. from_registers: the same with fragments of a as in mma.sync (matrix.cuh). By default b is
///   MN-major.
template <typename T, int n>
struct WarpgroupProduct;

// An instruction names each of its registers. These lists are composed of groups of 8.
#define TILEWISE_C8(i)                                                                        \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), \
      "+f"(c[i + 6]), "+f"(c[i + 7])
#define TILEWISE_REGISTERS_4 "%0, %1, %2, %3"
#define TILEWISE_C_4 "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
#define TILEWISE_REGISTERS_8 TILEWISE_REGISTERS_4 ", %4, %5, %6, %7"
#define TILEWISE_C_8 TILEWISE_C8(0)
#define TILEWISE_REGISTERS_16 TILEWISE_REGISTERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TILEWISE_C_16 TILEWISE_C_8, TILEWISE_C8(8)
#define TILEWISE_REGISTERS_24 TILEWISE_REGISTERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define TILEWISE_C_24 TILEWISE_C_16, TILEWISE_C8(16)
#define TILEWISE_REGISTERS_32 TILEWISE_REGISTERS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define TILEWISE_C_32 TILEWISE_C_24, TILEWISE_C8(24)
#define TILEWISE_REGISTERS_40 TILEWISE_REGISTERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TILEWISE_C_40 TILEWISE_C_32, TILEWISE_C8(32)
#define TILEWISE_REGISTERS_48 TILEWISE_REGISTERS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TILEWISE_C_48 TILEWISE_C_40, TILEWISE_C8(40)
#define TILEWISE_REGISTERS_56 TILEWISE_REGISTERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define TILEWISE_C_56 TILEWISE_C_48, TILEWISE_C8(48)
#define TILEWISE_REGISTERS_64 TILEWISE_REGISTERS_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define TILEWISE_C_64 TILEWISE_C_56, TILEWISE_C8(56)
#define TILEWISE_REGISTERS_72 TILEWISE_REGISTERS_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define TILEWISE_C_72 TILEWISE_C_64, TILEWISE_C8(64)
#define TILEWISE_REGISTERS_80 TILEWISE_REGISTERS_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define TILEWISE_C_80 TILEWISE_C_72, TILEWISE_C8(72)
#define TILEWISE_REGISTERS_84 TILEWISE_REGISTERS_80 ", %80, %81, %82, %83"
#define TILEWISE_C_84 TILEWISE_C_80, "+f"(c[80]), "+f"(c[81]), "+f"(c[82]), "+f"(c[83])
#define TILEWISE_REGISTERS_88 TILEWISE_REGISTERS_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define TILEWISE_C_88 TILEWISE_C_80, TILEWISE_C8(80)
#define TILEWISE_REGISTERS_96 TILEWISE_REGISTERS_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define TILEWISE_C_96 TILEWISE_C_88, TILEWISE_C8(88)
#define TILEWISE_REGISTERS_112                   \
  TILEWISE_REGISTERS_96                          \
  ", %96, %97, %98, %99, %100, %101, %102, %103" \
  ", %104, %105, %106, %107, %108, %109, %110, %111"
#define TILEWISE_C_112 TILEWISE_C_96, TILEWISE_C8(96), TILEWISE_C8(104)
#define TILEWISE_REGISTERS_128                       \
  TILEWISE_REGISTERS_112                             \
  ", %112, %113, %114, %115, %116, %117, %118, %119" \
  ", %120, %121, %122, %123, %124, %125, %126, %127"
#define TILEWISE_C_128 TILEWISE_C_112, TILEWISE_C8(112), TILEWISE_C8(120)

// The operands after c's registers are numbered from `half` on: i0, i1, ...
#define TILEWISE_PRODUCT(T, type, n, half, i0, i1, i2, i3, i4, i5, i6)                                       \
  template <>                                                                                                \
  struct WarpgroupProduct<T, n> {                                                                            \
    template <int transposed_a = 0, int transposed_b = 0>                                                    \
    static __device__ __forceinline__ void from_shared(float (&c)[half], TileDescriptor a, TileDescriptor b, \
                                                       bool add) {                                           \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " i2                                                    \
                   ", 0;\n"                                                                                  \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type                           \
                   " {" TILEWISE_REGISTERS_##half "}, " i0 ", " i1 ", p, 1, 1, " i3 ", " i4 ";\n}"           \
                   : TILEWISE_C_##half                                                                       \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(transposed_a), "n"(transposed_b));      \
    }                                                                                                        \
    template <int transposed_b = 1>                                                                          \
    static __device__ __forceinline__ void from_registers(float (&c)[half], const std::uint32_t (&a)[4],     \
                                                          TileDescriptor b, bool add) {                      \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " i5                                                    \
                   ", 0;\n"                                                                                  \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type                           \
                   " {" TILEWISE_REGISTERS_##half "}, {" i0 ", " i1 ", " i2 ", " i3 "}, " i4                 \
                                                  ", p, 1, 1, " i6 ";\n}"                                    \
                   : TILEWISE_C_##half                                                                       \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),         \
                     "n"(transposed_b));                                                                     \
    }                                                                                                        \
  };

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
TILEWISE_PRODUCT(__half, "f16", 8, 4, "%4", "%5", "%6", "%7", "%8", "%9", "%10")
TILEWISE_PRODUCT(__nv_bfloat16, "bf16", 8, 4, "%4", "%5", "%6", "%7", "%8", "%9", "%10")
TILEWISE_PRODUCT(__half, "f16", 16, 8, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
TILEWISE_PRODUCT(__nv_bfloat16, "bf16", 16, 8, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
TILEWISE_PRODUCT(__half, "f16", 32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
TILEWISE_PRODUCT(__nv_bfloat16, "bf16", 32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
TILEWISE_PRODUCT(__half, "f16", 48, 24, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
TILEWISE_PRODUCT(__nv_bfloat16, "bf16", 48, 24, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
TILEWISE_PRODUCT(__half, "f16", 64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
TILEWISE_PRODUCT(__nv_bfloat16, "bf16", 64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
TILEWISE_PRODUCT(__half, "f16", 80, 40, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
TILEWISE_PRODUCT(__nv_bfloat16, "bf16", 80, 40, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
TILEWISE_PRODUCT(__half, "f16", 96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
TILEWISE_PRODUCT(__nv_bfloat16, "bf16", 96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
TILEWISE_PRODUCT(__half, "f16", 112, 56, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
TILEWISE_PRODUCT(__nv_bfloat16, "bf16", 112, 56, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
TILEWISE_PRODUCT(__half, "f16", 128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
TILEWISE_PRODUCT(__nv_bfloat16, "bf16", 128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
TILEWISE_PRODUCT(__half, "f16", 144, 72, "%72", "%73", "%74", "%75", "%76", "%77", "%78")
TILEWISE_PRODUCT(__nv_bfloat16, "bf16", 144, 72, "%72", "%73", "%74", "%75", "%76", "%77", "%78")
TILEWISE_PRODUCT(__half, "f16", 160, 80, "%80", "%81", "%82", "%83", "%84", "%85", "%86")
TILEWISE_PRODUCT(__nv_bfloat16, "bf16", 160, 80, "%80", "%81", "%82", "%83", "%84", "%85", "%86")
TILEWISE_PRODUCT(__half, "f16", 168, 84, "%84", "%85", "%86", "%87", "%88", "%89", "%90")
TILEWISE_PRODUCT(__nv_bfloat16, "bf16", 168, 84, "%84", "%85", "%86", "%87", "%88", "%89", "%90")
TILEWISE_PRODUCT(__half, "f16", 176, 88, "%88", "%89", "%90", "%91", "%92", "%93", "%94")
TILEWISE_PRODUCT(__nv_bfloat16, "bf16", 176, 88, "%88", "%89", "%90", "%91", "%92", "%93", "%94")
TILEWISE_PRODUCT(__half, "f16", 192, 96, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
TILEWISE_PRODUCT(__nv_bfloat16, "bf16", 192, 96, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
TILEWISE_PRODUCT(__half, "f16", 224, 112, "%112", "%113", "%114", "%115", "%116", "%117", "%118")
TILEWISE_PRODUCT(__nv_bfloat16, "bf16", 224, 112, "%112", "%113", "%114", "%115", "%116", "%117", "%118")
TILEWISE_PRODUCT(__half, "f16", 256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")
TILEWISE_PRODUCT(__nv_bfloat16, "bf16", 256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")
#endif

#undef TILEWISE_PRODUCT
#undef TILEWISE_C8
#undef TILEWISE_REGISTERS_4
#undef TILEWISE_C_4
#undef TILEWISE_REGISTERS_8
#undef TILEWISE_C_8
#undef TILEWISE_REGISTERS_16
#undef TILEWISE_C_16
#undef TILEWISE_REGISTERS_24
#undef TILEWISE_C_24
#undef TILEWISE_REGISTERS_32
#undef TILEWISE_C_32
#undef TILEWISE_REGISTERS_40
#undef TILEWISE_C_40
#undef TILEWISE_REGISTERS_48
#undef TILEWISE_C_48
#undef TILEWISE_REGISTERS_56
#undef TILEWISE_C_56
#undef TILEWISE_REGISTERS_64
#undef TILEWISE_C_64
#undef TILEWISE_REGISTERS_72
#undef TILEWISE_C_72
#undef TILEWISE_REGISTERS_80
#undef TILEWISE_C_80
#undef TILEWISE_REGISTERS_84
#undef TILEWISE_C_84
#undef TILEWISE_REGISTERS_88
#undef TILEWISE_C_88
#undef TILEWISE_REGISTERS_96
#undef TILEWISE_C_96
#undef TILEWISE_REGISTERS_112
#undef TILEWISE_C_112
#undef TILEWISE_REGISTERS_128
#undef TILEWISE_C_128

}  // namespace tilewise::cuda
