// This host, and its other processes as /proc shows them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace qe {

std::string host_name();

// When the process began, in the system's ticks: with its number it names a process for good. Nothing: no such process
// runs, a zombie included.
std::optional<std::uint64_t> birth_of(int pid) noexcept;

int parent_of(int pid) noexcept;  // 0: unknown

}  // namespace qe
