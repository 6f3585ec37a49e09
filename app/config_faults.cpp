#include "app/config_faults.h"

#include <algorithm>
#include <cctype>
#include <sstream>

#include "core/error.h"

namespace qe {
namespace {

constexpr std::size_t kMostSuggestions = 3;

std::string plain(std::string_view name) {
  std::string out;
  for (const char c : name) out += c == '-' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

// Insertions, deletions and replacements; two neighbours exchanged count one.
int edit_distance(const std::string& a, const std::string& b) {
  std::vector<int> before(b.size() + 1), last(b.size() + 1), now(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) last[j] = static_cast<int>(j);
  for (std::size_t i = 1; i <= a.size(); ++i) {
    now[0] = static_cast<int>(i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      now[j] = std::min({last[j] + 1, now[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) now[j] = std::min(now[j], before[j - 2] + 1);
    }
    std::swap(before, last);
    std::swap(last, now);
  }
  return last[b.size()];
}

bool is_near(int distance, std::size_t length) { return distance <= std::max(2, static_cast<int>(length) / 2); }

// Keeps the candidates of least cost.
class Best {
 public:
  void offer(int cost, const std::string& name) {
    if (names_.empty() || cost < cost_) names_.clear(), cost_ = cost;
    if (cost == cost_ && names_.size() < kMostSuggestions) names_.push_back(name);
  }
  [[nodiscard]] std::vector<std::string> take() { return std::move(names_); }

 private:
  int cost_ = 0;
  std::vector<std::string> names_;
};

}  // namespace

void Faults::add(const std::string& path, const std::string& sentence) {
  lines_.push_back(shortened(path, 100) + ": " + sentence);
  paths_.insert(path);
}

bool Faults::none_at(std::initializer_list<std::string_view> paths) const {
  return std::none_of(paths.begin(), paths.end(), [this](std::string_view p) { return paths_.contains(p); });
}

void Faults::throw_if_any(const std::string& source) const {
  if (lines_.empty()) return;
  std::string message =
      source + (lines_.size() == 1 ? " has a fault:" : " has " + std::to_string(lines_.size()) + " faults:");
  for (const std::string& line : lines_) message += "\n  " + line;
  throw ConfigError(message);
}

std::string shortened(const std::string& text, std::size_t most) {
  if (text.size() <= most) return text;
  std::size_t end = most - 3;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;  // the middle of a character
  return text.substr(0, end) + "...";
}

std::string counted(std::int64_t count, const std::string& what, const char* plural) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : plural);
}

std::pair<std::string, std::string> first_difference(const std::string& a, const std::string& b) {
  const auto bare = [](const std::string& line) {
    const std::size_t start = line.find_first_not_of(' '), end = line.find_last_not_of(" ,");
    return start == std::string::npos ? "nothing" : line.substr(start, end - start + 1);
  };
  std::istringstream left(a), right(b);
  std::string l, r;
  do {
    l.clear(), r.clear();
    std::getline(left, l);
    std::getline(right, r);
  } while (l == r && (left || right));
  return {bare(l), bare(r)};
}

std::string join(const std::vector<std::string>& parts) {
  std::string out;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) out += i + 1 == parts.size() ? " and " : ", ";
    out += parts[i];
  }
  return out;
}

std::string nearest_multiples(std::int64_t value, std::int64_t unit) {
  const std::int64_t below = value / unit * unit;
  if (below == 0) return "the nearest is " + std::to_string(unit);
  return "the nearest are " + std::to_string(below) + " and " + std::to_string(below + unit);
}

std::vector<std::string> nearest_names(std::string_view name, const std::vector<std::string>& candidates) {
  Best best;
  for (const std::string& candidate : candidates) {
    const int distance = edit_distance(plain(name), plain(candidate));
    if (is_near(distance, std::min(name.size(), candidate.size()))) best.offer(distance, candidate);
  }
  return best.take();
}

std::vector<std::string> nearest_keys(std::string_view section, std::string_view name,
                                      const std::vector<std::string>& paths) {
  Best best;
  for (const std::string& path : paths) {
    const std::size_t dot = path.find('.');
    const std::string leaf = path.substr(dot + 1);
    const int distance = edit_distance(plain(name), plain(leaf));
    if (!is_near(distance, std::min(name.size(), leaf.size()))) continue;
    best.offer(2 * distance + (path.compare(0, dot, section) == 0 ? 0 : 1), path);
  }
  return best.take();
}

}  // namespace qe
