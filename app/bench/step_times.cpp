#include "app/bench/step_times.h"

#include <algorithm>
#include <cctype>
#include <map>

namespace qe {
namespace {

using Json = nlohmann::ordered_json;

// "12F3" → "F", "0W4x4" → "W", "1SEND_F0" → "SEND_F", "copy to 0F1" → "copy", "refresh 2" → "refresh".
std::string kind_of(const StepTimeline::Piece& piece) {
  const std::string& name = piece.name;
  if (std::isdigit(static_cast<unsigned char>(name.front())) == 0) {
    const bool numbered = name.starts_with("copy") || std::isdigit(static_cast<unsigned char>(name.back())) != 0;
    return numbered ? name.substr(0, name.find(' ')) : name;
  }
  const auto letter = [](unsigned char c) { return std::isalpha(c) != 0 || c == '_'; };
  const auto begin = std::find_if(name.begin(), name.end(), letter);
  return {begin, std::find_if_not(begin, name.end(), letter)};
}

}  // namespace

std::string to_text(const std::vector<StepTimeline::Piece>& pieces) {
  Json list = Json::array();
  for (const StepTimeline::Piece& p : pieces) list.push_back({p.lane, p.name, p.begin_ms, p.end_ms});
  return list.dump();
}

std::vector<StepTimeline::Piece> pieces_from(const std::string& text) {
  std::vector<StepTimeline::Piece> pieces;
  for (const Json& j : Json::parse(text)) {
    pieces.push_back(
        {j.at(0).get<std::string>(), j.at(1).get<std::string>(), j.at(2).get<double>(), j.at(3).get<double>()});
  }
  return pieces;
}

Json chrome_trace(const std::vector<std::vector<StepTimeline::Piece>>& ranks) {
  Json events = Json::array();
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    std::vector<std::string> lanes;
    events.push_back(
        {{"ph", "M"}, {"pid", rank}, {"name", "process_name"}, {"args", {{"name", "rank " + std::to_string(rank)}}}});
    for (const StepTimeline::Piece& p : ranks[rank]) {
      const auto lane = std::find(lanes.begin(), lanes.end(), p.lane);
      const auto thread = lane - lanes.begin();
      if (lane == lanes.end()) {
        lanes.push_back(p.lane);
        events.push_back(
            {{"ph", "M"}, {"pid", rank}, {"tid", thread}, {"name", "thread_name"}, {"args", {{"name", p.lane}}}});
      }
      events.push_back({{"ph", "X"},
                        {"pid", rank},
                        {"tid", thread},
                        {"name", p.name},
                        {"cat", kind_of(p)},
                        {"ts", p.begin_ms * 1e3},
                        {"dur", (p.end_ms - p.begin_ms) * 1e3}});
    }
  }
  return {{"displayTimeUnit", "ms"}, {"traceEvents", events}};
}

Json time_by_kind(const std::vector<StepTimeline::Piece>& pieces) {
  std::map<std::string, std::vector<double>> kinds;
  double end = 0, compute_begin = 0, compute_end = 0, busy = 0;
  for (const StepTimeline::Piece& p : pieces) {
    kinds[kind_of(p)].push_back(p.end_ms - p.begin_ms);
    end = std::max(end, p.end_ms);
    if (p.lane != "compute") continue;
    if (busy == 0) compute_begin = p.begin_ms;
    compute_end = p.end_ms;  // a stream is in order
    busy += p.end_ms - p.begin_ms;
  }
  Json table = Json::object();
  for (auto& [kind, times] : kinds) {
    std::sort(times.begin(), times.end());
    double sum = 0;
    for (const double t : times) sum += t;
    table[kind] = {{"count", times.size()}, {"median_ms", times[times.size() / 2]}, {"sum_ms", sum}};
  }
  return {{"span_ms", end}, {"compute_idle_ms", compute_end - compute_begin - busy}, {"kinds", table}};
}

}  // namespace qe
