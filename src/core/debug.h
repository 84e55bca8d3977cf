#pragma once

#include <string_view>

#include "tilewise/context.h"

namespace tilewise {

// What environment variables ask for when something goes wrong: docs/debugging.md. Each is read once, except
// for TILEWISE_TRIAL.

/// Whether calls look at index tensors on a device first: Context::check_indices or TILEWISE_CHECK=1.
bool checks_indices(const Context& context);

/// Whether TILEWISE_TRIAL=1 lets kernels take what no GPU has run yet, when they are asked for by name.
bool allows_trials();

/// Whether TILEWISE_LOG names a file that could be opened.
bool logs_launches();
/// Appends a line to it, which is written when this returns.
void log_launch(std::string_view operation, std::string_view problem, std::string_view kernel);

}  // namespace tilewise
