#pragma once

#include <string_view>

#include "tilewise/context.h"

namespace tilewise {

// Environment variables for debugging, described in docs/debugging.md. Each is read once, except for
// TILEWISE_TRIAL.

/// Whether calls check index tensors on a device first, by Context::check_indices or TILEWISE_CHECK=1.
bool checks_indices(const Context& context);

/// Whether TILEWISE_TRIAL=1 allows kernels that are named to take problems that they have on trial.
bool allows_trials();

/// Whether TILEWISE_LOG names a file that could be opened.
bool logs_launches();
/// Appends a line to that file. The line is written when this returns.
void log_launch(std::string_view operation, std::string_view problem, std::string_view kernel);

}  // namespace tilewise
