// The text picture of a schedule: a row a step, a column a rank. Owns formatting only.
#include <algorithm>

#include "schedules/schedules.h"

namespace qe {
namespace {

constexpr int kStepsAroundError = 24;  // a long list's error would otherwise drown in its grid

std::string padded(std::string text, std::size_t width) {
  if (text.size() < width) text.append(width - text.size(), ' ');
  return text;
}

}  // namespace

std::string format_grid(const Schedule& schedule, int error_rank, int error_position) {
  const bool has_error = error_rank >= 0;
  int steps = 0;
  for (const auto& list : schedule.actions) steps = std::max(steps, static_cast<int>(list.size()));
  if (has_error) steps = std::max(steps, error_position + 1);
  const int first = has_error ? std::max(0, error_position - kStepsAroundError) : 0;
  const int last = has_error ? std::min(steps, error_position + kStepsAroundError + 1) : steps;

  const auto cell = [&](std::size_t rank, int step) -> std::string {
    const auto& list = schedule.actions[rank];
    const bool in_list = step < static_cast<int>(list.size());
    const bool faulty = has_error && static_cast<int>(rank) == error_rank && step == error_position;
    const std::string text = in_list ? to_string(list[static_cast<std::size_t>(step)]) : faulty ? "(end)" : "";
    return faulty ? text + " <-- ERROR HERE" : text;
  };

  std::vector<std::size_t> widths;
  for (std::size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    std::size_t width = std::string("rank ").size() + std::to_string(rank).size();
    for (int step = first; step < last; ++step) width = std::max(width, cell(rank, step).size());
    widths.push_back(width);
  }
  const std::size_t label_width = std::max<std::size_t>(4, std::to_string(std::max(0, last - 1)).size());

  const auto add_row = [&](std::string& grid, std::string row) {
    row.erase(row.find_last_not_of(' ') + 1);
    grid += row + "\n";
  };
  std::string grid;
  std::string header = padded("step", label_width);
  for (std::size_t rank = 0; rank < widths.size(); ++rank) {
    header += "  " + padded("rank " + std::to_string(rank), widths[rank]);
  }
  add_row(grid, header);
  for (int step = first; step < last; ++step) {
    std::string row = padded(std::to_string(step), label_width);
    for (std::size_t rank = 0; rank < widths.size(); ++rank) row += "  " + padded(cell(rank, step), widths[rank]);
    add_row(grid, row);
  }
  return grid;
}

}  // namespace qe
