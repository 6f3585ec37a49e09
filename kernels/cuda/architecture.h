// Does this build hold device code for the current card? Owns one kernel that exists only to be asked for.
#pragma once

namespace qe::cuda {

[[nodiscard]] bool has_code_for_current_device();

}  // namespace qe::cuda
