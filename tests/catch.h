// Catch2 v2 (Debian 12) and v3 (Ubuntu 24.04) meet here and nowhere else.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Matchers::ContainsSubstring;
#else
#include <catch2/catch.hpp>
namespace qe_catch {
inline auto ContainsSubstring(const std::string& text) { return Catch::Matchers::Contains(text); }
}  // namespace qe_catch
using qe_catch::ContainsSubstring;
#endif
