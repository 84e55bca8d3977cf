#pragma once

#include "tilewise/layer.h"

namespace tilewise {

/// Checks what the layer's operations would report under other names or could not see, such as the shapes of
/// weights and arguments that belong together. Throws InvalidArgument.
void check_layer(const LayerConfig& config, const LayerWeights& weights, const LayerInputs& inputs,
                 const LayerOutputs& outputs, const Context& context);
void check_layer_backward(const LayerConfig& config, const LayerWeights& weights, const LayerInputs& inputs,
                          const LayerGradients& gradients, const Context& context);

}  // namespace tilewise
