#pragma once

namespace tilewise::test {

/// Runs a kernel that faults and waits for it. No CUDA call of this process succeeds any more.
void fault_on_device();

}  // namespace tilewise::test
