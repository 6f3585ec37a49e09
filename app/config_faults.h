// The faults of one config, gathered so that all of them reach the user in one message, and the words they share.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace qe {

class Faults {
 public:
  // `path` is a key, a section or a place; `sentence` says what was found, what was wanted and what is nearest.
  void add(const std::string& path, const std::string& sentence);
  // A check that reads several keys stays silent while one of them has a fault of its own.
  [[nodiscard]] bool none_at(std::initializer_list<std::string_view> paths) const;
  // Throws ConfigError: "<source> has 2 faults:", then a line each.
  void throw_if_any(const std::string& source) const;

 private:
  std::vector<std::string> lines_;
  std::set<std::string, std::less<>> paths_;
};

// A name or value as a message shows it: cut to `most` bytes between characters, "..." at the end.
std::string shortened(const std::string& text, std::size_t most);
// "1 file", "2 files"; "2 matches" with another ending.
std::string counted(std::int64_t count, const std::string& what, const char* plural = "s");
// "a", "a and b", "a, b and c".
std::string join(const std::vector<std::string>& parts);
// The first line that two texts do not share, as each has it, without spaces and commas around; "nothing" past an end.
std::pair<std::string, std::string> first_difference(const std::string& a, const std::string& b);
// "the nearest is 16", "the nearest are 512 and 528": positive multiples of unit around a value that is none.
std::string nearest_multiples(std::int64_t value, std::int64_t unit);

// The names of `candidates` that are fewest edits from `name`, case and hyphens aside; up to three, empty if none is
// near.
std::vector<std::string> nearest_names(std::string_view name, const std::vector<std::string>& candidates);
// The same for keys "section.key": a right key in a wrong section comes first.
std::vector<std::string> nearest_keys(std::string_view section, std::string_view name,
                                      const std::vector<std::string>& paths);

}  // namespace qe
