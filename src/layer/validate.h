#pragma once

#include "tilewise/layer.h"

namespace tilewise {

/// Checks all that the layer's operations would name differently, or not see: shapes of the weights, and what
/// belongs together. Throws InvalidArgument.
void check_layer(const LayerConfig& config, const LayerWeights& weights, const LayerInputs& inputs,
                 const LayerOutputs& outputs, const Context& context);
void check_layer_backward(const LayerConfig& config, const LayerWeights& weights, const LayerInputs& inputs,
                          const LayerGradients& gradients, const Context& context);

}  // namespace tilewise
