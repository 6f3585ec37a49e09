// A second, independent reading of the execution rules: runs lowered lists on symbols and tells whether the result is
// what the model needs. Shares no code with schedules/, so that validate() has something to be compared with.
#pragma once

#include <string>

#include "core/schedule.h"

namespace qe_test {

// Empty when every rank finishes with every result made once, from the right inputs, in ascending order; else the first
// thing that went wrong.
std::string run_lists(const qe::Schedule& lowered);

}  // namespace qe_test
