#include "app/start_check.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "app/config_faults.h"
#include "app/plan_memory.h"
#include "core/error.h"
#include "kernels/wire/process.h"

namespace qe {
namespace {

using Json = nlohmann::json;

// The optimizer computes on the caller's stream, everything else on the graphs'.
constexpr std::size_t kComputingStreams = 2;

std::string gibibytes(std::size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f GiB", static_cast<double>(bytes) / static_cast<double>(std::size_t{1} << 30));
  return text;
}

// What a rank tells the others.
struct Standing {
  std::string refusal;  // why it cannot compute; empty: it can
  std::string where;    // the memory that it uses
  std::size_t free = 0;
  std::array<std::size_t, kMemoryKinds> bytes{};  // it needs
  [[nodiscard]] std::size_t total() const { return std::accumulate(bytes.begin(), bytes.end(), std::size_t{0}); }
};

Json to_json(const Standing& s) {
  return {{"refusal", s.refusal}, {"where", s.where}, {"free", s.free}, {"bytes", s.bytes}};
}
Standing standing_from(const Json& j) {
  return {j.at("refusal").get<std::string>(), j.at("where").get<std::string>(), j.at("free").get<std::size_t>(),
          j.at("bytes").get<std::array<std::size_t, kMemoryKinds>>()};
}

std::string lines_of(const std::vector<GemmChoice>& choices) {
  std::string text;
  for (const GemmChoice& c : choices) text += c.product + ": algorithm " + c.algorithm + "\n";
  return text;
}

void expect_products(const std::vector<Standing>& all) {
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (!all[r].refusal.empty()) {
      throw AgreedError(ExitCode::kDevice, "Rank " + std::to_string(r) + ": " + all[r].refusal);
    }
  }
}

// The largest kinds, and what lowers them.
std::string advice(const Standing& need, const RankConfig& config) {
  std::vector<std::size_t> kinds(kMemoryKinds);
  std::iota(kinds.begin(), kinds.end(), std::size_t{0});
  std::stable_sort(kinds.begin(), kinds.end(), [&](auto a, auto b) { return need.bytes[a] > need.bytes[b]; });
  kinds.resize(3);
  std::string list, ways;
  for (const std::size_t k : kinds) {
    const auto kind = static_cast<MemoryKind>(k);
    list += (list.empty() ? "" : ", ") + std::string(name_of(kind)) + " " + gibibytes(need.bytes[k]);
    if (kind == MemoryKind::kGradients && config.stage.gradients.placement != Placement::kAccumulate) {
      ways += "gradients.placement accumulate, ";
    } else if (kind == MemoryKind::kTape) {
      ways += config.peak_slots ? "a smaller training.micro_batch_size, "
                                : "pipeline.tape_slots peak, fewer microbatches (training.global_batch_size), ";
    } else if (kind == MemoryKind::kMoments && config.optimizer.moments != DType::kBF16) {
      ways += "optimizer.moments_dtype bf16, ";
    }
  }
  return " (" + list + "); use " + ways +
         "more ranks (pipeline.pipeline_model_parallel_size), fewer chunks a rank or a smaller model.";
}

void expect_room(const std::vector<Standing>& all, const RankConfig& config) {
  std::map<std::string, std::pair<int, std::size_t>> places;  // ranks and their bytes
  for (const Standing& s : all) {
    ++places[s.where].first;
    places[s.where].second += s.total();
  }
  for (std::size_t r = 0; r < all.size(); ++r) {
    const Standing& s = all[r];
    const auto& [ranks, bytes] = places[s.where];
    if (bytes <= s.free) continue;
    throw AgreedError(
        ExitCode::kDevice,
        "Rank " + std::to_string(r) + " needs " + gibibytes(s.total()) +
            (ranks == 1 ? "" : ", and the " + std::to_string(ranks) + " ranks there " + gibibytes(bytes)) + ", but " +
            s.where + " has " + gibibytes(s.free) + " free" + advice(s, config));
  }
}

}  // namespace

void expect_same_gemms(const std::vector<GemmChoice>& mine, Transport& transport) {
  const std::string table = lines_of(mine);
  const std::vector<std::string> digests =
      transport.exchange(std::to_string(XXH3_64bits(table.data(), table.size())), Group::kWorld);
  const auto other = std::find_if(digests.begin(), digests.end(), [&](const auto& d) { return d != digests.front(); });
  if (other == digests.end()) return;
  const auto r = static_cast<std::size_t>(other - digests.begin());
  const std::vector<std::string> tables = transport.exchange(table, Group::kWorld);
  const auto [first, here] = first_difference(tables.front(), tables[r]);
  throw AgreedError(ExitCode::kDevice, "Rank " + std::to_string(r) + " would compute \"" + here +
                                           "\" where rank 0 has \"" + first +
                                           "\", so bits would depend on who computes; use the same GPU model and "
                                           "the same libraries on every rank.");
}

StartCheck check_start(const RankConfig& config, const RankPlan& plan, Backend& backend, Transport& transport) {
  const int replicas = transport.size(Group::kData);
  const MemoryPool pool = backend.device->memory_pool();
  StartCheck check;
  Standing mine;
  mine.where = host_name() + " " + pool.name;
  mine.free = pool.free;
  mine.bytes = lay_out(config, plan, transport.rank(Group::kPipeline), replicas).bytes;
  mine.bytes[static_cast<std::size_t>(MemoryKind::kWorkspace)] += kComputingStreams * pool.workspace;
  check.planned_bytes = mine.total();
  try {
    if (GemmChooser* chooser = gemm_chooser(backend)) {
      check.gemms = chooser->choose_gemms(matrix_products(config, plan, replicas));
    }
  } catch (const DeviceError& e) {
    mine.refusal = e.what();
  }
  std::vector<Standing> all;
  for (const std::string& text : transport.exchange(to_json(mine).dump(), Group::kWorld)) {
    all.push_back(standing_from(Json::parse(text)));
  }
  try {
    expect_products(all);
    expect_same_gemms(check.gemms, transport);
    expect_room(all, config);
  } catch (const AgreedError&) {
    transport.barrier(Group::kWorld);  // a rank that unwinds is heard of, so all must know why first
    throw;
  }
  return check;
}

}  // namespace qe
