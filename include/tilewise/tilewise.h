#pragma once

// The whole public face.
#include "tilewise/attention.h"
#include "tilewise/context.h"
#include "tilewise/dtype.h"
#include "tilewise/error.h"
#include "tilewise/half.h"
#include "tilewise/tensor.h"
#include "tilewise/version.h"
