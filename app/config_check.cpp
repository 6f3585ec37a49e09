#include "app/config_check.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "app/injected_faults.h"
#include "app/regular_file.h"
#include "core/error.h"
#include "schedules/csv.h"

namespace qe {
namespace {

constexpr int kFp8Unit = 16;                   // FP8 matrix products take widths in steps of 16
constexpr int kScaleBlock = 128;               // tokens that share a scale in cuBLASLt's block-scaled products
constexpr std::int64_t kMostTokens = 1 << 24;  // of one microbatch: sizes of [T, ffn] stay far from overflow

std::string str(std::int64_t v) { return std::to_string(v); }

// The divisor of n nearest to `wanted` for which `fits` holds; 0: none.
template <class Fits>
int nearest_divisor(int n, int wanted, Fits fits) {
  int best = 0;
  for (int d = 1; d <= n; ++d) {
    if (n % d == 0 && fits(d) && (best == 0 || std::abs(d - wanted) < std::abs(best - wanted))) best = d;
  }
  return best;
}

void check_heads(const Config& c, Faults& faults) {
  if (!faults.none_at({"model.hidden_size", "model.num_attention_heads", "precision.compute"})) return;
  const int h = c.model.hidden_size, heads = c.model.num_attention_heads;
  const bool fp8 = c.precision.compute == Compute::kFp8;
  if (fp8 && h % kFp8Unit != 0) return;  // check_fp8_widths asks for another hidden_size first
  const auto fits = [&](int d) { return !fp8 || h / d % kFp8Unit == 0; };
  if (h % heads != 0) {
    faults.add("model.num_attention_heads", "found " + str(heads) + ", wanted a divisor of model.hidden_size " +
                                                str(h) + "; the nearest is " + str(nearest_divisor(h, heads, fits)) +
                                                ".");
  } else if (!fits(heads)) {
    faults.add("model.num_attention_heads", "found " + str(heads) + ", which makes heads " + str(h / heads) +
                                                " wide; fp8 needs a multiple of 16, the nearest is " +
                                                str(nearest_divisor(h, heads, fits)) + " heads.");
  }
}

void check_fp8_widths(const Config& c, Faults& faults) {
  if (c.precision.compute != Compute::kFp8 || !faults.none_at({"precision.compute"})) return;
  const auto width = [&](const char* path, int value) {
    if (value % kFp8Unit == 0 || !faults.none_at({path})) return;
    faults.add(path,
               "found " + str(value) + ", fp8 needs a multiple of 16; " + nearest_multiples(value, kFp8Unit) + ".");
  };
  width("model.hidden_size", c.model.hidden_size);
  width("model.ffn_hidden_size", c.model.ffn_hidden_size);
  if (!faults.none_at({"training.seq_length", "training.micro_batch_size"})) return;
  const std::int64_t tokens = std::int64_t{c.training.seq_length} * c.training.micro_batch_size;
  if (tokens % kFp8Unit == 0) return;
  const int unit = kFp8Unit / std::gcd(kFp8Unit, c.training.micro_batch_size);
  faults.add("training.seq_length", "found " + str(c.training.seq_length) + ", which with training.micro_batch_size " +
                                        str(c.training.micro_batch_size) + " makes " + str(tokens) +
                                        " tokens a microbatch; fp8 needs a multiple of 16, " +
                                        nearest_multiples(c.training.seq_length, unit) + ".");
}

void check_precision(const Config& c, Faults& faults) {
  if (faults.none_at({"precision.compute", "execution.backend"}) && c.precision.compute == Compute::kFp32 &&
      c.execution.backend != "cpu") {
    faults.add("execution.backend", "found \"" + c.execution.backend +
                                        "\", precision.compute fp32 runs only on \"cpu\"; \"auto\" finds it.");
  }
  if (faults.none_at({"precision.compute", "head.precision"}) && c.precision.compute != Compute::kFp8 &&
      c.head.precision != HeadPrecision::kBf16) {
    faults.add("head.precision", "found an fp8 head without precision.compute fp8; wanted \"bf16\".");
  }
}

void check_bf16_layers(const Config& c, Faults& faults) {
  const std::vector<int>& list = c.precision.bf16_layers;
  const std::string path = "precision.bf16_layers";
  if (!faults.none_at({path, "precision.compute", "model.num_layers"}) || list.empty()) return;
  if (c.precision.compute != Compute::kFp8) {
    faults.add(path, "has no effect without precision.compute fp8; remove it, or choose fp8.");
    return;
  }
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (list[i] >= c.model.num_layers) {
      faults.add(path, "found layer " + str(list[i]) + ", wanted layers from 0 to " + str(c.model.num_layers - 1) +
                           " of model.num_layers " + str(c.model.num_layers) + ".");
    } else if (i > 0 && list[i] == list[i - 1]) {
      faults.add(path, "found layer " + str(list[i]) + " twice; wanted each layer once.");
    } else if (i > 0 && list[i] < list[i - 1]) {
      faults.add(path, "found layer " + str(list[i]) + " after " + str(list[i - 1]) + "; wanted ascending layers.");
    }
  }
}

// What the CUDA kernels can do, where the config asks for them by name; with "auto" the device says it at capture.
void check_cuda(const Config& c, Faults& faults) {
  if (!faults.none_at({"execution.backend"}) || c.execution.backend != "cuda") return;
  const ModelConfig& m = c.model;
  if (faults.none_at({"model.hidden_size", "model.num_attention_heads"}) && m.head_dim() != 64 && m.head_dim() != 128) {
    faults.add("model.num_attention_heads", "found " + str(m.num_attention_heads) + ", which makes heads " +
                                                str(m.head_dim()) +
                                                " wide; execution.backend cuda has kernels for 64 and 128.");
  }
  const std::int64_t tokens = std::int64_t{c.training.seq_length} * c.training.micro_batch_size;
  if (faults.none_at({"gradients.w_group", "training.seq_length", "training.micro_batch_size"}) &&
      c.gradients.w_group > 1 && c.precision.compute == Compute::kFp8 && tokens % kScaleBlock != 0) {
    faults.add("gradients.w_group", "found " + str(c.gradients.w_group) + " with " + str(tokens) +
                                        " tokens a microbatch; under fp8 execution.backend cuda needs a multiple of " +
                                        str(kScaleBlock) + " for more than 1, the nearest w_group is 1.");
  }
}

void check_transport(const Config& c, Faults& faults) {
  if (!faults.none_at({"execution.backend", "execution.transport"})) return;
  const std::string &backend = c.execution.backend, &transport = c.execution.transport;
  const bool fits = transport == "auto" || backend == "auto" || (transport == "mpi") == (backend == "cpu");
  if (!fits) {
    faults.add("execution.transport", "found \"" + transport + "\", wanted " +
                                          (backend == "cpu" ? "\"mpi\"" : "\"ipc\" or \"nccl\"") +
                                          " or \"auto\" with execution.backend \"" + backend + "\".");
  }
}

void check_gemm_table(const Config& c, Faults& faults) {
  if (!faults.none_at({"execution.backend", "execution.gemm_table"})) return;
  if (c.execution.backend == "cpu" && !c.execution.gemm_table.empty()) {
    faults.add("execution.gemm_table", "has no effect under execution.backend cpu; remove it, or choose cuda.");
  }
}

void check_checkpoint(const Config& c, Faults& faults) {
  if (!faults.none_at({"checkpoint.dir", "checkpoint.interval"})) return;
  if (c.checkpoint.interval > 0 && c.checkpoint.dir.empty()) {
    faults.add("checkpoint.dir",
               "found none, wanted a folder with checkpoint.interval " + str(c.checkpoint.interval) + ".");
  } else if (c.checkpoint.async && c.checkpoint.dir.empty()) {
    faults.add("checkpoint.dir", "found none, wanted a folder with checkpoint.async true.");
  }
}

void check_replicas(const Config& c, Faults& faults) {
  if (!faults.none_at({"parallel.data"}) || c.parallel.data == 1) return;
  if (faults.none_at({"gradients.placement"}) && c.gradients.placement != Placement::kAccumulate) {
    faults.add("parallel.data",
               "found " + str(c.parallel.data) + ", which needs gradients.placement \"accumulate\"; the nearest is 1.");
  }
  if (faults.none_at({"gradients.dtype"}) && c.gradients.dtype != DType::kF32) {
    faults.add("gradients.dtype", "found \"bf16\", but replicas sum \"fp32\" gradients.");
  }
  if (faults.none_at({"fp8.reduce_amax", "precision.compute"}) && c.precision.compute == Compute::kFp8 &&
      c.fp8.reduce_amax == ReduceAmax::kOff) {
    faults.add("fp8.reduce_amax",
               "found \"off\", but the scales of " + str(c.parallel.data) + " replicas must stay one; wanted \"dp\".");
  }
}

void check_batches(const Config& c, Faults& faults) {
  const TrainingSection& t = c.training;
  if (faults.none_at({"training.seq_length", "model.max_position_embeddings"}) &&
      t.seq_length > c.model.max_position_embeddings) {
    faults.add("training.seq_length", "found " + str(t.seq_length) + ", wanted at most model.max_position_embeddings " +
                                          str(c.model.max_position_embeddings) + ".");
  }
  if (!faults.none_at({"training.micro_batch_size"})) return;
  const std::int64_t tokens = std::int64_t{t.seq_length} * t.micro_batch_size;
  if (faults.none_at({"training.seq_length"}) && tokens > kMostTokens) {
    faults.add("training.micro_batch_size", "found " + str(t.micro_batch_size) + ", which makes " + str(tokens) +
                                                " tokens a microbatch; wanted at most " + str(kMostTokens) +
                                                ", the nearest is " + str(kMostTokens / t.seq_length) + ".");
  }
  if (!faults.none_at({"training.global_batch_size", "parallel.data"})) return;
  const std::int64_t unit = std::int64_t{t.micro_batch_size} * c.parallel.data;
  if (t.global_batch_size % unit != 0) {
    faults.add("training.global_batch_size", "found " + str(t.global_batch_size) +
                                                 ", wanted a multiple of micro_batch_size x parallel.data = " +
                                                 str(t.micro_batch_size) + " x " + str(c.parallel.data) + " = " +
                                                 str(unit) + "; " + nearest_multiples(t.global_batch_size, unit) + ".");
  }
}

bool holds(const Schedule& lists, ActionKind kind) {
  return std::any_of(lists.actions.begin(), lists.actions.end(), [kind](const std::vector<Action>& list) {
    return std::any_of(list.begin(), list.end(), [kind](const Action& a) { return a.kind == kind; });
  });
}

// A file may hold single Ws, which are grouped like every schedule's, or the groups themselves.
void check_csv_groups(const Schedule& lists, int group, Faults& faults) {
  const auto is_w = [](const Action& a) { return a.kind == ActionKind::kWeightGrad; };
  bool grouped = false;
  for (const auto& list : lists.actions) {
    for (const Action& a : list) grouped |= is_w(a) && a.count != 1;
  }
  for (std::size_t rank = 0; grouped && rank < lists.actions.size(); ++rank) {
    for (const Action& a : lists.actions[rank]) {
      if (!is_w(a) || (a.count == group && to_int(a.microbatch) % group == 0)) continue;
      faults.add("pipeline.schedule_csv", "found " + to_string(a) + " in line " + str(static_cast<int>(rank) + 1) +
                                              " among Ws over several microbatches; wanted single Ws, or groups of " +
                                              "gradients.w_group " + str(group) + " from its multiples.");
      return;
    }
  }
}

void check_csv(const Config& c, const Given& given, Faults& faults) {
  if (!faults.none_at({"pipeline.schedule", "pipeline.schedule_csv"})) return;
  if (c.pipeline.schedule != ScheduleKind::kCsv) {
    if (!c.pipeline.schedule_csv.empty()) {
      faults.add("pipeline.schedule_csv", std::string("has no effect under pipeline.schedule ") +
                                              name_of(c.pipeline.schedule) + "; remove it, or choose csv.");
    }
    return;
  }
  const PipelineShape file = c.pipeline.csv_lists->shape;
  const auto mismatch = [&](const char* path, std::int64_t found, const std::string& wanted, std::int64_t nearest) {
    if (found == nearest) return;
    faults.add(path, "found " + str(found) + ", " + c.pipeline.schedule_csv + " has " + wanted + "; wanted " +
                         str(nearest) + ".");
  };
  if (faults.none_at({"pipeline.pipeline_model_parallel_size"})) {
    mismatch("pipeline.pipeline_model_parallel_size", c.pipeline.pipeline_model_parallel_size,
             str(file.ranks) + " lines, one a rank", file.ranks);
  }
  if (given.contains("pipeline.virtual_pipeline_model_parallel_size") &&
      faults.none_at({"pipeline.virtual_pipeline_model_parallel_size"})) {
    mismatch("pipeline.virtual_pipeline_model_parallel_size", c.pipeline.virtual_pipeline_model_parallel_size,
             str(file.chunks_per_rank) + " stages a line", file.chunks_per_rank);
  }
  if (faults.none_at({"training.global_batch_size", "training.micro_batch_size", "parallel.data"}) &&
      c.microbatches() != file.microbatches) {
    faults.add("training.global_batch_size",
               "found " + str(c.training.global_batch_size) + ", which makes " + str(c.microbatches()) +
                   " microbatches; " + c.pipeline.schedule_csv + " has " + str(file.microbatches) + ", wanted " +
                   str(std::int64_t{file.microbatches} * c.training.micro_batch_size * c.parallel.data) + ".");
  }
  if (faults.none_at({"gradients.w_group"})) check_csv_groups(*c.pipeline.csv_lists, c.gradients.w_group, faults);
}

void check_pipeline(const Config& c, const Given& given, Faults& faults) {
  const PipelineSection& p = c.pipeline;
  const char* ranks = "pipeline.pipeline_model_parallel_size";
  const char* chunks = "pipeline.virtual_pipeline_model_parallel_size";
  if (!faults.none_at({ranks, chunks, "pipeline.schedule"})) return;
  PipelineShape shape{p.pipeline_model_parallel_size, p.virtual_pipeline_model_parallel_size, 1};
  const bool batch_known = faults.none_at({"training.global_batch_size", "training.micro_batch_size", "parallel.data"});
  // One microbatch fits every schedule, so a refusal of it is about the ranks or chunks.
  std::string reason = why_not(p.schedule, shape);
  if (!reason.empty()) {
    faults.add(chunks, reason);
  } else if (batch_known) {
    reason = why_not(p.schedule, c.shape());
    if (!reason.empty()) faults.add("training.global_batch_size", reason);
  }
  if (!faults.none_at({"model.num_layers", "pipeline.layers_per_stage", chunks})) return;
  const int stages = shape.stages();
  if (c.model.num_layers < stages) {
    faults.add("model.num_layers", "found " + str(c.model.num_layers) + ", wanted a layer for each of the " +
                                       str(stages) + " stages at least; the nearest is " + str(stages) + ".");
  } else if (given.contains("pipeline.layers_per_stage")) {
    const auto& list = p.layers_per_stage;
    const std::int64_t sum = std::accumulate(list.begin(), list.end(), std::int64_t{0});
    if (std::ssize(list) != stages) {
      faults.add("pipeline.layers_per_stage", "found a list of " + str(std::ssize(list)) +
                                                  ", wanted an entry for each of the " + str(stages) + " stages.");
    } else if (sum != c.model.num_layers) {
      faults.add("pipeline.layers_per_stage",
                 "found a sum of " + str(sum) + ", wanted model.num_layers " + str(c.model.num_layers) + ".");
    }
  }
}

void check_w_group(const Config& c, Faults& faults) {
  const int group = c.gradients.w_group;
  const std::string found = "found " + str(group) + ", ";
  if (!faults.none_at({"gradients.w_group"}) || group == 1) return;
  if (faults.none_at({"gradients.placement"}) && c.gradients.placement != Placement::kAccumulate) {
    faults.add("gradients.w_group", found + "which needs gradients.placement \"accumulate\"; the nearest is 1.");
  } else if (faults.none_at({"pipeline.backward"}) && c.pipeline.backward == Backward::kFull) {
    faults.add("gradients.w_group", found + "which needs pipeline.backward \"split\"; the nearest is 1.");
  } else if (faults.none_at({"training.global_batch_size", "training.micro_batch_size", "parallel.data"}) &&
             c.microbatches() % group != 0) {
    faults.add("gradients.w_group", found + "wanted a divisor of the " + str(c.microbatches()) +
                                        " microbatches of a step; the nearest is " +
                                        str(nearest_divisor(c.microbatches(), group, [](int) { return true; })) + ".");
  }
}

void check_gradients(const Config& c, Faults& faults) {
  const GradientConfig& g = c.gradients;
  check_w_group(c, faults);
  if (!faults.none_at({"gradients.placement"}) || g.placement == Placement::kAccumulate) return;
  const std::string placement = g.placement == Placement::kArena ? "arena" : "copied";
  if (faults.none_at({"gradients.dtype"}) && g.dtype != DType::kF32) {
    faults.add("gradients.dtype", "found \"bf16\", gradients.placement " + placement + " sums into \"fp32\" only.");
  }
  if (faults.none_at({"pipeline.tape_slots"}) && c.pipeline.tape_slots == TapeSlots::kPeak) {
    faults.add("pipeline.tape_slots", "found \"peak\", gradients.placement " + placement +
                                          " writes to a view of each microbatch and needs \"per_microbatch\".");
  }
}

void check_learning_rate(const Config& c, Faults& faults) {
  const TrainingSection& t = c.training;
  const bool constant = t.lr_schedule == LrSchedule::kConstant;
  if (!faults.none_at({"training.lr_schedule", "training.train_iters", "training.lr_warmup_iters"})) return;
  if (t.train_iters > 0 && t.lr_warmup_iters > t.train_iters) {
    faults.add("training.lr_warmup_iters",
               "found " + str(t.lr_warmup_iters) + ", wanted at most training.train_iters " + str(t.train_iters) + ".");
  }
  if (faults.none_at({"training.lr", "training.min_lr"})) {
    if (constant && t.min_lr > 0) {
      faults.add("training.min_lr",
                 "has no effect under training.lr_schedule constant; remove it, or choose cosine, linear or wsd.");
    } else if (t.min_lr > t.lr) {
      faults.add("training.min_lr", "found more than training.lr; wanted at most training.lr.");
    }
  }
  if (!faults.none_at({"training.lr_decay_iters", "training.lr_warmup_iters"})) return;
  if (constant && t.lr_decay_iters > 0) {
    faults.add("training.lr_decay_iters",
               "has no effect under training.lr_schedule constant; remove it, or choose cosine, linear or wsd.");
  } else if (t.lr_schedule == LrSchedule::kWsd && t.train_iters > 0 &&
             t.lr_decay_iters > t.train_iters - t.lr_warmup_iters) {
    faults.add("training.lr_decay_iters", "found " + str(t.lr_decay_iters) + ", wanted at most the " +
                                              str(t.train_iters - t.lr_warmup_iters) + " steps after the warm-up.");
  } else if (!constant && t.lr_schedule != LrSchedule::kWsd && t.train_iters > 0 &&
             t.lr_decay_iters < std::max<std::int64_t>(t.lr_warmup_iters, 1)) {
    faults.add("training.lr_decay_iters",
               "found " + str(t.lr_decay_iters) + ", wanted the step that reaches training.min_lr, at least " +
                   (t.lr_warmup_iters > 0 ? "training.lr_warmup_iters " + str(t.lr_warmup_iters) : "1") + ".");
  }
}

void check_evaluation(const Config& c, Faults& faults) {
  const TrainingSection& t = c.training;
  if (!faults.none_at({"data.valid", "data.out_of_domain"})) return;
  const bool none = c.data.valid.empty() && c.data.out_of_domain.empty();
  if (faults.none_at({"training.train_iters"}) && t.train_iters == 0 && none) {
    faults.add("training.train_iters",
               "found 0, which evaluates only, and data.valid names nothing to evaluate; "
               "set data.valid, or train at least 1 step.");
  }
  if (faults.none_at({"training.eval_interval"}) && t.eval_interval > 0 && c.data.valid.empty()) {
    faults.add("training.eval_interval", "has no effect without data.valid; remove it, or set data.valid.");
  }
  if (faults.none_at({"training.eval_iters"}) && t.eval_iters > 0 && none) {
    faults.add("training.eval_iters", "has no effect without data.valid; remove it, or set data.valid.");
  }
}

std::vector<int> divide_layers(int layers, int stages) {
  std::vector<int> out(static_cast<std::size_t>(stages), layers / stages);
  for (int s = 0; s < layers % stages; ++s) ++out[static_cast<std::size_t>(s)];
  return out;
}

}  // namespace

void read_schedule_file(Config& c, Faults& faults) {
  if (!faults.none_at({"pipeline.schedule", "pipeline.schedule_csv"}) || c.pipeline.schedule != ScheduleKind::kCsv) {
    return;
  }
  if (c.pipeline.schedule_csv.empty()) {
    faults.add("pipeline.schedule_csv", "found none, pipeline.schedule csv needs the file of its lists.");
    return;
  }
  const RegularFile file(c.pipeline.schedule_csv);
  const std::optional<std::string> text = file.failure().empty() ? file.read_all() : std::nullopt;
  if (!text) {
    const std::string why = file.failure().empty() ? "cannot be read" : file.failure();
    faults.add("pipeline.schedule_csv", c.pipeline.schedule_csv + " " + why + "; wanted a schedule, a line a rank.");
    return;
  }
  try {
    c.pipeline.csv_lists = std::make_shared<const Schedule>(parse_schedule_csv(*text, c.pipeline.schedule_csv));
  } catch (const ScheduleError& e) {
    faults.add("pipeline.schedule_csv", e.what());
  }
}

void resolve_defaults(Config& c, const Given& given, const Faults& faults) {
  if (!given.contains("head.precision") && c.precision.compute != Compute::kFp8) {
    c.head.precision = HeadPrecision::kBf16;
  }
  if (c.precision.compute == Compute::kFp32 && c.execution.backend == "auto") c.execution.backend = "cpu";
  if (!given.contains("fp8.reduce_amax") && c.precision.compute == Compute::kFp8 && c.parallel.data > 1) {
    c.fp8.reduce_amax = ReduceAmax::kData;
  }
  PipelineSection& p = c.pipeline;
  if (!given.contains("pipeline.virtual_pipeline_model_parallel_size")) {
    p.virtual_pipeline_model_parallel_size = p.csv_lists                        ? p.csv_lists->shape.chunks_per_rank
                                             : p.schedule == ScheduleKind::kZbv ? 2
                                                                                : 1;
  }
  if (!given.contains("pipeline.backward") && p.csv_lists && !holds(*p.csv_lists, ActionKind::kWeightGrad)) {
    p.backward = Backward::kFull;
  }
  if (!given.contains("pipeline.tape_slots")) {
    p.tape_slots = c.gradients.placement == Placement::kAccumulate ? TapeSlots::kPeak : TapeSlots::kPerMicrobatch;
  }
  if (!given.contains("training.lr_decay_iters")) {
    TrainingSection& t = c.training;
    if (t.lr_schedule == LrSchedule::kCosine || t.lr_schedule == LrSchedule::kLinear) t.lr_decay_iters = t.train_iters;
    if (t.lr_schedule == LrSchedule::kWsd) t.lr_decay_iters = t.train_iters / 10;
  }
  const bool stages_known =
      faults.none_at({"pipeline.pipeline_model_parallel_size", "pipeline.virtual_pipeline_model_parallel_size"});
  if (!given.contains("pipeline.layers_per_stage") && stages_known) {
    p.layers_per_stage =
        divide_layers(c.model.num_layers, p.pipeline_model_parallel_size * p.virtual_pipeline_model_parallel_size);
  }
}

void check_config(const Config& c, const Given& given, Faults& faults) {
  check_fp8_widths(c, faults);
  check_heads(c, faults);
  check_precision(c, faults);
  check_bf16_layers(c, faults);
  check_cuda(c, faults);
  check_transport(c, faults);
  check_gemm_table(c, faults);
  check_checkpoint(c, faults);
  check_replicas(c, faults);
  check_batches(c, faults);
  check_csv(c, given, faults);
  check_pipeline(c, given, faults);
  check_gradients(c, faults);
  check_learning_rate(c, faults);
  check_evaluation(c, faults);
  check_injected_faults(c, faults);
}

}  // namespace qe
