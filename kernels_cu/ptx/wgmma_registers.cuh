// Parts that the wgmma macros share: the registers of an accumulator as text, %0 to %(n - 1), and
// the same registers as operands of asm.
#pragma once

#include "config.cuh"

// clang-format off
#define CUFLASH_PTX_NUMBERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CUFLASH_PTX_NUMBERS_16 CUFLASH_PTX_NUMBERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define CUFLASH_PTX_NUMBERS_24 CUFLASH_PTX_NUMBERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define CUFLASH_PTX_NUMBERS_32 CUFLASH_PTX_NUMBERS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define CUFLASH_PTX_NUMBERS_40 CUFLASH_PTX_NUMBERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define CUFLASH_PTX_NUMBERS_48 CUFLASH_PTX_NUMBERS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define CUFLASH_PTX_NUMBERS_56 CUFLASH_PTX_NUMBERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define CUFLASH_PTX_NUMBERS_64 CUFLASH_PTX_NUMBERS_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define CUFLASH_PTX_NUMBERS_96 CUFLASH_PTX_NUMBERS_64                                \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define CUFLASH_PTX_NUMBERS_128 CUFLASH_PTX_NUMBERS_96                                           \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define CUFLASH_PTX_ACC_AT(i)                                                           \
  "+f"(acc[i]), "+f"(acc[i + 1]), "+f"(acc[i + 2]), "+f"(acc[i + 3]), "+f"(acc[i + 4]), \
  "+f"(acc[i + 5]), "+f"(acc[i + 6]), "+f"(acc[i + 7])
#define CUFLASH_PTX_ACC_8 CUFLASH_PTX_ACC_AT(0)
#define CUFLASH_PTX_ACC_16 CUFLASH_PTX_ACC_8, CUFLASH_PTX_ACC_AT(8)
#define CUFLASH_PTX_ACC_24 CUFLASH_PTX_ACC_16, CUFLASH_PTX_ACC_AT(16)
#define CUFLASH_PTX_ACC_32 CUFLASH_PTX_ACC_24, CUFLASH_PTX_ACC_AT(24)
#define CUFLASH_PTX_ACC_40 CUFLASH_PTX_ACC_32, CUFLASH_PTX_ACC_AT(32)
#define CUFLASH_PTX_ACC_48 CUFLASH_PTX_ACC_40, CUFLASH_PTX_ACC_AT(40)
#define CUFLASH_PTX_ACC_56 CUFLASH_PTX_ACC_48, CUFLASH_PTX_ACC_AT(48)
#define CUFLASH_PTX_ACC_64 CUFLASH_PTX_ACC_56, CUFLASH_PTX_ACC_AT(56)
#define CUFLASH_PTX_ACC_96 CUFLASH_PTX_ACC_64, CUFLASH_PTX_ACC_AT(64), \
  CUFLASH_PTX_ACC_AT(72), CUFLASH_PTX_ACC_AT(80), CUFLASH_PTX_ACC_AT(88)
#define CUFLASH_PTX_ACC_128 CUFLASH_PTX_ACC_96, CUFLASH_PTX_ACC_AT(96), \
  CUFLASH_PTX_ACC_AT(104), CUFLASH_PTX_ACC_AT(112), CUFLASH_PTX_ACC_AT(120)
// clang-format on
