// The rows of the key table. Owns names, ranges, defaults and meanings; reads and writes nothing.
#include "app/config_keys.h"

#include <cctype>
#include <utility>

namespace qe {
namespace {

template <class Enum>
using Names = std::vector<std::pair<std::string, Enum>>;

constexpr double kMostSteps = 4e9;  // a step's number is held in 32 bits

// Builds the rows of one section. `field` is a callable Config& → the member.
class Section {
 public:
  Section(std::vector<KeySpec>& table, std::string name) : table_(table), name_(std::move(name)) {}

  template <class Field>
  KeySpec& integer(const char* key, double minimum, double maximum, Field field, const char* meaning) {
    KeySpec& spec = row(key, ValueType::kInteger, meaning);
    spec.minimum = minimum;
    spec.maximum = maximum;
    using Value = std::remove_reference_t<decltype(field(std::declval<Config&>()))>;
    spec.set = [field](Config& c, const Json& v) { return field(c) = static_cast<Value>(v.get<std::int64_t>()), true; };
    spec.get = [field](const Config& c) { return Json(field(const_cast<Config&>(c))); };
    return spec;
  }
  template <class Field>
  KeySpec& boolean(const char* key, Field field, const char* meaning) {
    KeySpec& spec = row(key, ValueType::kBoolean, meaning);
    spec.set = [field](Config& c, const Json& v) { return field(c) = v.get<bool>(), true; };
    spec.get = [field](const Config& c) { return Json(field(const_cast<Config&>(c))); };
    return spec;
  }
  template <class Field>
  KeySpec& number(const char* key, double minimum, double maximum, Field field, const char* meaning) {
    KeySpec& spec = row(key, ValueType::kNumber, meaning);
    spec.minimum = minimum;
    spec.maximum = maximum;
    spec.set = [field](Config& c, const Json& v) { return field(c) = v.get<double>(), true; };
    spec.get = [field](const Config& c) { return Json(field(const_cast<Config&>(c))); };
    return spec;
  }
  // A number that the arithmetic takes as FP32.
  template <class Field>
  KeySpec& single(const char* key, double minimum, double maximum, Field field, const char* meaning) {
    KeySpec& spec = number(key, minimum, maximum, field, meaning);
    spec.single = true;
    return spec;
  }
  template <class Enum, class Field>
  KeySpec& choice(const char* key, Names<Enum> names, Field field, const char* meaning) {
    KeySpec& spec = row(key, ValueType::kString, meaning);
    for (const auto& [text, value] : names) spec.choices.push_back(text);
    spec.set = [field, names](Config& c, const Json& v) {
      for (const auto& [text, value] : names) {
        if (v.get<std::string>() == text) return field(c) = value, true;
      }
      return false;
    };
    spec.get = [field, names](const Config& c) {
      for (const auto& [text, value] : names) {
        if (field(const_cast<Config&>(c)) == value) return Json(text);
      }
      return Json(nullptr);
    };
    return spec;
  }
  // A key that has one value so far.
  void only(const char* key, const char* value, const char* meaning) {
    KeySpec& spec = row(key, ValueType::kString, meaning);
    spec.choices = {value};
    spec.set = [value](Config&, const Json& v) { return v == value; };
    spec.get = [value](const Config&) { return Json(value); };
  }
  template <class Field>
  KeySpec& text(const char* key, Field field, const char* meaning) {
    KeySpec& spec = row(key, ValueType::kString, meaning);
    spec.set = [field](Config& c, const Json& v) { return field(c) = v.get<std::string>(), true; };
    spec.get = [field](const Config& c) { return Json(field(const_cast<Config&>(c))); };
    return spec;
  }
  // One string stands for a list of one, the empty one for an empty list.
  template <class Field>
  KeySpec& texts(const char* key, Field field, const char* meaning) {
    KeySpec& spec = row(key, ValueType::kStringList, meaning);
    spec.set = [field](Config& c, const Json& v) {
      field(c) = v == ""         ? std::vector<std::string>{}
                 : v.is_string() ? std::vector{v.get<std::string>()}
                                 : v.get<std::vector<std::string>>();
      return true;
    };
    spec.get = [field](const Config& c) { return Json(field(const_cast<Config&>(c))); };
    return spec;
  }
  template <class Field>
  KeySpec& integers(const char* key, double minimum, double maximum, Field field, const char* meaning) {
    KeySpec& spec = row(key, ValueType::kIntegerList, meaning);
    spec.minimum = minimum;
    spec.maximum = maximum;
    spec.set = [field](Config& c, const Json& v) { return field(c) = v.get<std::vector<int>>(), true; };
    spec.get = [field](const Config& c) { return Json(field(const_cast<Config&>(c))); };
    return spec;
  }

 private:
  KeySpec& row(const char* key, ValueType type, const char* meaning) {
    KeySpec& spec = table_.emplace_back();
    spec.section = name_;
    spec.name = key;
    spec.type = type;
    spec.meaning = meaning;
    return spec;
  }
  std::vector<KeySpec>& table_;
  std::string name_;
};

#define QE_FIELD(member) \
  [](Config & c) -> auto& { return c.member; }

void add_model(std::vector<KeySpec>& table) {
  Section s(table, "model");
  s.integer("num_layers", 1, 4096, QE_FIELD(model.num_layers), "transformer layers");
  s.integer("hidden_size", 1, 131072, QE_FIELD(model.hidden_size),
            "width of the residual stream; fp8: a multiple of 16");
  s.integer("ffn_hidden_size", 1, 1048576, QE_FIELD(model.ffn_hidden_size), "width of the MLP; fp8: a multiple of 16");
  s.integer("num_attention_heads", 1, 4096, QE_FIELD(model.num_attention_heads),
            "heads; divides hidden_size, and under fp8 leaves a head width that is a multiple of 16");
  s.integer("vocab_size", 2, 2097152, QE_FIELD(model.vocab_size),
            "token ids are below this; padded inside to a multiple of 128; bytes and their end mark: 257");
  s.integer("max_position_embeddings", 1, 16777216, QE_FIELD(model.max_position_embeddings),
            "rows of the position table; at least training.seq_length");
}

void add_numerics(std::vector<KeySpec>& table) {
  Section precision(table, "precision");
  precision.choice<Compute>("compute", {{"fp8", Compute::kFp8}, {"bf16", Compute::kBf16}, {"fp32", Compute::kFp32}},
                            QE_FIELD(precision.compute),
                            "type of the layers' matrix products; fp32 is the oracle of the cpu backend");
  precision.integers("bf16_layers", 0, 4095, QE_FIELD(precision.bf16_layers),
                     "layers, counted from 0, whose matrix products stay in BF16 under fp8; ascending");

  Section fp8(table, "fp8");
  fp8.only("recipe", "delayed", "how scales are chosen");
  fp8.choice<Fp8Format>("format", {{"hybrid", Fp8Format::kHybrid}, {"e4m3", Fp8Format::kE4M3}}, QE_FIELD(fp8.format),
                        "hybrid: E4M3 forward, E5M2 for gradients; e4m3: E4M3 everywhere");
  fp8.integer("amax_history_len", 1, 65536, QE_FIELD(fp8.amax_history_len), "absolute maxima each slot remembers");
  fp8.choice<AmaxAlgorithm>("amax_compute_algo",
                            {{"max", AmaxAlgorithm::kMax}, {"most_recent", AmaxAlgorithm::kMostRecent}},
                            QE_FIELD(fp8.amax_compute_algo), "which of them sets the scale");
  fp8.integer("margin", 0, 32, QE_FIELD(fp8.margin), "scales are divided by 2^margin");
  fp8.choice<ScaleUpdate>("scale_update", {{"microbatch", ScaleUpdate::kMicrobatch}, {"step", ScaleUpdate::kStep}},
                          QE_FIELD(fp8.scale_update), "scales move after every microbatch, or once a step");
  fp8.choice<ReduceAmax>("reduce_amax", {{"off", ReduceAmax::kOff}, {"dp", ReduceAmax::kData}},
                         QE_FIELD(fp8.reduce_amax),
                         "dp: amaxes are the largest over all replicas, which keeps their scales one")
      .derived_default = "dp with replicas under fp8, else off";

  Section head(table, "head");
  head.choice<HeadPrecision>("precision",
                             {{"fp8_delayed", HeadPrecision::kFp8Delayed},
                              {"fp8_dynamic", HeadPrecision::kFp8Dynamic},
                              {"bf16", HeadPrecision::kBf16}},
                             QE_FIELD(head.precision),
                             "type of the output projection; bf16 follows fp32 compute into FP32")
      .derived_default = "fp8_delayed under fp8, else bf16";
}

void add_training(std::vector<KeySpec>& table) {
  Section s(table, "training");
  s.integer("train_iters", 0, kMostSteps, QE_FIELD(training.train_iters),
            "optimizer steps, skipped ones counted; 0: evaluate only");
  s.integer("seq_length", 1, 16777216, QE_FIELD(training.seq_length), "tokens of one sequence");
  s.integer("micro_batch_size", 1, 65536, QE_FIELD(training.micro_batch_size), "sequences of one microbatch");
  s.integer("global_batch_size", 1, 16777216, QE_FIELD(training.global_batch_size),
            "sequences of one step over all microbatches and replicas");
  s.integer("seed", 0, 9007199254740991.0, QE_FIELD(training.seed), "of the initial parameters and the data order");
  s.single("lr", 0, 1e6, QE_FIELD(training.lr), "peak learning rate");
  s.single("min_lr", 0, 1e6, QE_FIELD(training.min_lr), "learning rate at the end of the decay");
  s.choice<LrSchedule>("lr_schedule",
                       {{"constant", LrSchedule::kConstant},
                        {"cosine", LrSchedule::kCosine},
                        {"linear", LrSchedule::kLinear},
                        {"wsd", LrSchedule::kWsd}},
                       QE_FIELD(training.lr_schedule),
                       "after the warm-up; wsd stays at lr and falls linearly at the end");
  s.integer("lr_warmup_iters", 0, kMostSteps, QE_FIELD(training.lr_warmup_iters), "steps of linear warm-up");
  s.integer("lr_decay_iters", 0, kMostSteps, QE_FIELD(training.lr_decay_iters),
            "cosine, linear: the step that reaches min_lr; wsd: the length of the final fall")
      .derived_default = "train_iters under cosine and linear, a tenth of it under wsd, 0 under constant";
  s.integer("eval_interval", 0, 1e12, QE_FIELD(training.eval_interval),
            "steps between evaluations on data.valid; 0: only after the last step");
  s.integer("eval_iters", 0, 1e12, QE_FIELD(training.eval_iters),
            "microbatches of one evaluation; 0: every full window of data.valid once");
  s.choice<NonFinitePolicy>("on_nonfinite", {{"stop", NonFinitePolicy::kStop}, {"skip", NonFinitePolicy::kSkip}},
                            QE_FIELD(training.on_nonfinite),
                            "what a step with a loss or gradient that is not finite does");
  s.integer("max_skipped", 1, 1000000, QE_FIELD(training.max_skipped),
            "under skip: the run stops when this many steps in a row are skipped");
}

void add_optimizer(std::vector<KeySpec>& table) {
  Section s(table, "optimizer");
  s.single("adam_beta1", 0, 1, QE_FIELD(optimizer.adam_beta1), "decay of the first moment").below_maximum = true;
  s.single("adam_beta2", 0, 1, QE_FIELD(optimizer.adam_beta2), "decay of the second moment").below_maximum = true;
  s.single("adam_eps", 0, 1, QE_FIELD(optimizer.adam_eps), "added to the root of the second moment").above_minimum =
      true;
  s.single("weight_decay", 0, 10, QE_FIELD(optimizer.weight_decay), "decoupled, on matrices only");
  s.single("clip_grad", 0, 1e12, QE_FIELD(optimizer.clip_grad), "largest global gradient norm; 0: no clipping");
  s.choice<DType>("moments_dtype", {{"fp32", DType::kF32}, {"bf16", DType::kBF16}}, QE_FIELD(optimizer.moments_dtype),
                  "type of both moments; bf16 rounds stochastically");
}

void add_gradients_and_pipeline(std::vector<KeySpec>& table) {
  Section g(table, "gradients");
  g.choice<Placement>(
      "placement",
      {{"accumulate", Placement::kAccumulate}, {"arena", Placement::kArena}, {"copied", Placement::kCopied}},
      QE_FIELD(gradients.placement),
      "where W writes: one main gradient, a view per microbatch, or staging and a copy per microbatch");
  g.choice<DType>("dtype", {{"fp32", DType::kF32}, {"bf16", DType::kBF16}}, QE_FIELD(gradients.dtype),
                  "type of the matrices' main gradient; bf16 only with accumulate");
  g.integer(
      "w_group", 1, 1024, QE_FIELD(gradients.w_group),
      "microbatches of one W action; divides the microbatches of a step; more than 1 only with accumulate and split");

  Section p(table, "pipeline");
  p.integer("pipeline_model_parallel_size", 1, 1024, QE_FIELD(pipeline.pipeline_model_parallel_size), "pipeline ranks");
  p.integer("virtual_pipeline_model_parallel_size", 1, 1024, QE_FIELD(pipeline.virtual_pipeline_model_parallel_size),
            "stages of one rank; 1f1b, gpipe: 1, zbv: 2, interleaved_1f1b, zb1p: any")
      .derived_default = "2 under zbv, the file's under csv, else 1";
  KeySpec& schedule = p.choice<ScheduleKind>(
      "schedule",
      {{"1f1b", ScheduleKind::k1F1B},
       {"interleaved_1f1b", ScheduleKind::kInterleaved1F1B},
       {"zbv", ScheduleKind::kZbv},
       {"zb1p", ScheduleKind::kZb1p},
       {"gpipe", ScheduleKind::kGpipe},
       {"csv", ScheduleKind::kCsv}},
      QE_FIELD(pipeline.schedule),
      "order of the actions; PyTorch's names are accepted, case-blind; csv: read from schedule_csv");
  schedule.aliases = {"1F1B", "Interleaved1F1B", "ZBVZeroBubble", "zb_v", "InterleavedZeroBubble", "GPipe"};
  schedule.set = [set = schedule.set](Config& c, const Json& v) {
    std::string name;
    for (const char letter : v.get<std::string>()) name += static_cast<char>(std::tolower(letter));
    if (name == "interleaved1f1b") name = "interleaved_1f1b";
    if (name == "interleavedzerobubble") name = "zb1p";
    if (name == "zbvzerobubble" || name == "zb_v") name = "zbv";
    return set(c, Json(name));
  };
  p.text("schedule_csv", QE_FIELD(pipeline.schedule_csv),
         "file of a csv schedule: PyTorch's text, one line a rank, compute alone or with communication");
  p.choice<Backward>("backward", {{"split", Backward::kSplit}, {"full", Backward::kFull}}, QE_FIELD(pipeline.backward),
                     "input and weight gradients as two actions, or as one")
      .derived_default = "full for a csv schedule of B without W, else split";
  p.choice<TapeSlots>("tape_slots", {{"peak", TapeSlots::kPeak}, {"per_microbatch", TapeSlots::kPerMicrobatch}},
                      QE_FIELD(pipeline.tape_slots),
                      "tapes and graphs for the live window, or for every microbatch; peak only with accumulate")
      .derived_default = "peak with accumulate, else per_microbatch";
  p.integers("layers_per_stage", 1, 4096, QE_FIELD(pipeline.layers_per_stage),
             "layers of each stage, in model order; sums to model.num_layers")
      .derived_default = "an even division, earlier stages take the remainder";

  Section(table, "parallel")
      .integer(
          "data", 1, 4096, QE_FIELD(parallel.data),
          "replicas of the pipeline, each with its share of the batch; more than 1 only with accumulate into fp32");
}

void add_machine(std::vector<KeySpec>& table) {
  Section e(table, "execution");
  e.choice<std::string>(
      "backend", {{"auto", "auto"}, {"cpu", "cpu"}, {"cuda", "cuda"}}, QE_FIELD(execution.backend),
      "where the arithmetic runs; auto: cuda when it was built in and a device is there, cpu under fp32");
  e.choice<ExecutionMode>("mode", {{"graph", ExecutionMode::kGraph}, {"eager", ExecutionMode::kEager}},
                          QE_FIELD(execution.mode), "replay captured graphs, or call every operation");
  e.only("graph_scope", "action", "what one captured graph holds");
  e.choice<std::string>("transport", {{"auto", "auto"}, {"mpi", "mpi"}, {"ipc", "ipc"}, {"nccl", "nccl"}},
                        QE_FIELD(execution.transport),
                        "how ranks exchange tensors; mpi: host memory, for the CPU; ipc: GPUs of one host, which ranks "
                        "may share; nccl: a GPU a rank; auto: mpi on the CPU, ipc on one host, else nccl");

  e.text(
      "gemm_table", QE_FIELD(execution.gemm_table),
      "cuda only: tune file made by bench --tune, with the algorithms of matrix products; without one, and for other "
      "products, cuBLASLt's first proposal");

  Section d(table, "data");
  d.texts("train", QE_FIELD(data.train), "token files to train on; paths or globs, a string or a list");
  d.texts("valid", QE_FIELD(data.valid), "token files to evaluate on; none: no evaluation");
  d.texts("out_of_domain", QE_FIELD(data.out_of_domain),
          "token files of another kind of text, evaluated once after the last step; none: not evaluated");
  d.choice<DataFormat>(
      "format", {{"llmc", DataFormat::kLlmc}, {"megatron", DataFormat::kMegatron}}, QE_FIELD(data.format),
      "llmc: llm.c shards, uint16 or uint32; megatron: .bin and .idx pairs, named by either or by what "
      "stands before the ending");

  Section k(table, "checkpoint");
  k.text("dir", QE_FIELD(checkpoint.dir), "folder of checkpoints, shared by all ranks; none: nothing is saved");
  k.integer("interval", 0, 1e12, QE_FIELD(checkpoint.interval),
            "steps between checkpoints; 0: only after the last step and on a signal");
  k.integer("keep_last", 1, 1000000, QE_FIELD(checkpoint.keep_last), "newest checkpoints that are kept");
  k.integer("keep_every", 0, 1e12, QE_FIELD(checkpoint.keep_every),
            "checkpoints of steps that are a multiple of this are kept as well; 0: none");
  k.boolean("async", QE_FIELD(checkpoint.async),
            "write in the background, from a copy in host memory as large as the rank's file");

  Section(table, "report")
      .text("dir", QE_FIELD(report.dir),
            "run directory; files of an earlier run in it are replaced, a resumed run goes on in them")
      .derived_default = "runs/<config name>-<time>";
  Section r(table, "runtime");
  r.number("timeout_s", 0, 1e9, QE_FIELD(runtime.timeout_s), "deadline of every wait, in seconds").above_minimum = true;
  r.texts("faults", QE_FIELD(runtime.faults),
          "faults that the run makes on purpose, only with train --enable-fault-injection; docs/failures.md has their "
          "words");
}

#undef QE_FIELD

}  // namespace

const std::vector<KeySpec>& key_table() {
  static const std::vector<KeySpec> table = [] {
    std::vector<KeySpec> t;
    add_model(t);
    add_numerics(t);
    add_training(t);
    add_optimizer(t);
    add_gradients_and_pipeline(t);
    add_machine(t);
    return t;
  }();
  return table;
}

const std::vector<RefusedKey>& refused_keys() {
  static const std::vector<RefusedKey> table = {
      {"dropout", "there is no dropout: a step has to be repeatable to the bit from its seed"},
      {"hidden_dropout", "there is no dropout: a step has to be repeatable to the bit from its seed"},
      {"attention_dropout", "there is no dropout: a step has to be repeatable to the bit from its seed"},
      {"tie_embeddings", "the output projection is a matrix of its own; tied embeddings are not available"},
      {"recompute", "activations are kept from F to W; they are not computed again"},
      {"recompute_granularity", "activations are kept from F to W; they are not computed again"},
      {"stage_placement",
       "where a stage stands follows from pipeline.schedule: in a V under zbv, in a loop under the others"},
      {"mask_targets", "every target counts in the loss; masked targets are not available"},
      {"loss_mask", "every target counts in the loss; masked targets are not available"},
      {"report.timeline", "a timeline of the run is not available yet"},
      {"attention", "attention has one implementation; there is nothing to choose yet"},
  };
  return table;
}

}  // namespace qe
