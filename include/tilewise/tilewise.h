#pragma once

// All public headers.
#include "tilewise/attention.h"
#include "tilewise/context.h"
#include "tilewise/dtype.h"
#include "tilewise/error.h"
#include "tilewise/explain.h"
#include "tilewise/ffn.h"
#include "tilewise/gemm.h"
#include "tilewise/half.h"
#include "tilewise/layer.h"
#include "tilewise/masks.h"
#include "tilewise/norm.h"
#include "tilewise/plan.h"
#include "tilewise/rope.h"
#include "tilewise/tensor.h"
#include "tilewise/tuning.h"
#include "tilewise/version.h"
