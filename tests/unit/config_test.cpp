// The strict config reader: syntax, names, ranges and contradictions, each refused in words that help.
#include "app/config.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "app/config_keys.h"
#include "app/utf8.h"
#include "core/error.h"
#include "tests/catch.h"

using namespace qe;

namespace {

std::string refusal(const std::string& json, const std::vector<std::string>& overrides = {}) {
  try {
    parse_config(json, "x.json", overrides);
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "accepted";
}

Config with(const std::vector<std::string>& overrides) { return parse_config("{}", "x.json", overrides); }
std::string refused(const std::vector<std::string>& overrides) { return refusal("{}", overrides); }

std::string one_key(const std::string& section, const std::string& name, const Json& value) {
  return Json{{section, {{name, value}}}}.dump();
}

int lines_of(const std::string& message) {  // faults listed
  return static_cast<int>(std::count(message.begin(), message.end(), '\n'));
}

std::string file_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

bool is_key(const std::string& section, const std::string& name) {
  return std::any_of(key_table().begin(), key_table().end(),
                     [&](const KeySpec& k) { return k.section == section && k.name == name; });
}

}  // namespace

TEST_CASE("an empty config is a valid run and its dump reads back to itself") {
  const Config c = parse_config("{}", "runs/tiny.json");
  CHECK(c.name == "tiny");
  CHECK(c.microbatches() == 4);
  CHECK(c.ranks() == 1);
  CHECK(c.stage_config().tokens() == 64);
  const std::string dump = dump_config(c);
  CHECK(dump_config(parse_config(dump, "tiny.json")) == dump);
  for (const KeySpec& key : key_table()) {
    INFO(key.path());
    CHECK(nlohmann::json::parse(dump).at(key.section).contains(key.name));
  }
}

TEST_CASE("a non-default config survives dump and parse") {
  const Config c =
      with({"pipeline.schedule=zbv", "pipeline.pipeline_model_parallel_size=2", "gradients.placement=arena",
            "training.lr=0.1", "training.lr_schedule=wsd", "precision.compute=bf16", "optimizer.moments_dtype=bf16",
            "data.train=[\"a.bin\",\"b*.bin\"]", "report.dir=out"});
  CHECK(dump_config(parse_config(dump_config(c), "x.json")) == dump_config(c));
  CHECK(c.data.train == std::vector<std::string>{"a.bin", "b*.bin"});
  CHECK(c.training.lr == 0.1);
  const Config mixed = with({"precision.bf16_layers=[0,3]", "gradients.w_group=2"});
  CHECK(dump_config(parse_config(dump_config(mixed), "x.json")) == dump_config(mixed));
  CHECK(mixed.stage_config().bf16_layers == std::vector<int>{0, 3});
}

TEST_CASE("every key, misspelt by a dropped letter, is refused with the right one named") {
  for (const KeySpec& key : key_table()) {
    for (std::size_t i = 0; i < key.name.size(); ++i) {
      std::string name = key.name;
      name.erase(i, 1);
      if (name.empty() || is_key(key.section, name)) continue;
      INFO(key.path() << " as " << name);
      CHECK_THAT(refusal(one_key(key.section, name, key.get(Config{}))), ContainsSubstring(key.path()));
    }
  }
}

TEST_CASE("every key in another case is refused with the right one named") {
  for (const KeySpec& key : key_table()) {
    std::string upper = key.name, capital = key.name;
    for (char& c : upper) c = static_cast<char>(std::toupper(c));
    capital[0] = static_cast<char>(std::toupper(capital[0]));
    for (const std::string& name : {upper, capital}) {
      INFO(key.path() << " as " << name);
      CHECK_THAT(refusal(one_key(key.section, name, key.get(Config{}))),
                 ContainsSubstring(key.section + "." + name + ": unknown key; the nearest is " + key.path() + "."));
    }
  }
}

TEST_CASE("every key with hyphens for underscores is refused with the right one named") {
  for (const KeySpec& key : key_table()) {
    std::string name = key.name;
    std::replace(name.begin(), name.end(), '_', '-');
    if (name == key.name) continue;
    INFO(key.path());
    CHECK_THAT(refusal(one_key(key.section, name, key.get(Config{}))),
               ContainsSubstring("the nearest is " + key.path() + "."));
  }
}

TEST_CASE("every key in every wrong section, and in none, is refused with its own section named") {
  for (const KeySpec& key : key_table()) {
    for (const KeySpec& other : key_table()) {
      if (other.section == key.section || is_key(other.section, key.name)) continue;
      INFO(key.path() << " in " << other.section);
      CHECK_THAT(refusal(one_key(other.section, key.name, key.get(Config{}))), ContainsSubstring(key.path()));
    }
    const bool names_a_section =
        std::any_of(key_table().begin(), key_table().end(), [&](const KeySpec& k) { return k.section == key.name; });
    if (names_a_section) continue;
    INFO(key.path() << " at the top");
    CHECK_THAT(refusal(Json{{key.name, key.get(Config{})}}.dump()), ContainsSubstring(key.path()));
    CHECK_THAT(refusal(Json{{key.path(), key.get(Config{})}}.dump()), ContainsSubstring("nearest is " + key.path()));
  }
}

TEST_CASE("every key of the wrong type or out of range is refused with its range") {
  for (const KeySpec& key : key_table()) {
    INFO(key.path());
    const bool boolean = key.type == ValueType::kBoolean;
    for (const Json& wrong : {Json(nullptr), boolean ? Json("true") : Json(true), Json(-7.5), Json::object()}) {
      CHECK_THAT(refusal(one_key(key.section, key.name, wrong)), ContainsSubstring(key.path() + ": found "));
    }
    if (key.type == ValueType::kInteger || key.type == ValueType::kNumber) {
      for (const Json& wrong : {Json("7"), Json(key.minimum - 1), Json(key.maximum * 2 + 1), Json(1e300)}) {
        CHECK_THAT(refusal(one_key(key.section, key.name, wrong)), ContainsSubstring("wanted " + key.range()));
      }
    }
    if (key.type == ValueType::kInteger) {
      CHECK_THAT(refusal(one_key(key.section, key.name, 1.5)), ContainsSubstring("wanted an integer"));
      CHECK_THAT(refusal("{\"" + key.section + "\": {\"" + key.name + "\": 18446744073709551615}}"),
                 ContainsSubstring("wanted an integer"));
    }
    if (!key.choices.empty()) {
      CHECK_THAT(refusal(one_key(key.section, key.name, key.choices.front() + "x")),
                 ContainsSubstring("the nearest is " + key.choices.front()));
    }
  }
}

TEST_CASE("misspelt sections are refused with the nearest") {
  CHECK_THAT(refusal(R"({"trainning": {}})"),
             ContainsSubstring("trainning: unknown section; the nearest is training."));
  CHECK_THAT(refusal(R"({"Model": {}})"), ContainsSubstring("the nearest is model."));
  CHECK_THAT(refusal(R"({"model": 3})"), ContainsSubstring("model: found 3, wanted a section"));
  CHECK_THAT(refused({"trainning.lr=1"}), ContainsSubstring("the nearest is training."));
}

TEST_CASE("features that do not exist are refused by name with a reason") {
  CHECK_THAT(refused({"model.dropout=0.1"}), ContainsSubstring("model.dropout: refused: there is no dropout"));
  CHECK_THAT(refused({"model.tie_embeddings=true"}), ContainsSubstring("tied embeddings"));
  CHECK_THAT(refused({"training.loss_mask=true"}), ContainsSubstring("masked targets"));
  CHECK_THAT(refused({"model.recompute=full"}), ContainsSubstring("refused: activations are kept from F to W"));
  CHECK_THAT(refused({"pipeline.schedule=zbv", "pipeline.stage_placement=loop"}),
             ContainsSubstring("follows from pipeline.schedule: in a V under zbv"));
  CHECK_THAT(refused({"report.timeline=true"}), ContainsSubstring("report.timeline: refused: a timeline"));
  CHECK_THAT(refused({"execution.graph_scope=step"}), ContainsSubstring("wanted \"action\""));
  CHECK_THAT(refused({"execution.backend=cpu", "execution.transport=nccl"}),
             ContainsSubstring("execution.transport") && ContainsSubstring("wanted \"mpi\" or \"auto\""));
  CHECK_THAT(refused({"execution.backend=cuda", "execution.transport=mpi"}),
             ContainsSubstring("wanted \"ipc\" or \"nccl\" or \"auto\""));
}

TEST_CASE("replicas need one accumulated FP32 gradient and one set of scales") {
  const auto two = [](const std::string& more) {
    return refused({"parallel.data=2", "training.global_batch_size=8", more});
  };
  CHECK(two("training.seed=1") == "accepted");
  CHECK(two("fp8.reduce_amax=dp") == "accepted");
  CHECK_THAT(two("fp8.reduce_amax=off"), ContainsSubstring("the scales of 2 replicas must stay one; wanted \"dp\""));
  CHECK_THAT(two("gradients.placement=arena"), ContainsSubstring("parallel.data: found 2"));
  CHECK_THAT(two("gradients.dtype=bf16"), ContainsSubstring("gradients.dtype: found \"bf16\""));
  CHECK_THAT(refused({"parallel.data=3"}), ContainsSubstring("wanted a multiple of micro_batch_size x parallel.data"));
}

TEST_CASE("what the CUDA kernels cannot do is refused where cuda is asked for by name") {
  const auto cuda = [](std::vector<std::string> more) {
    more.push_back("execution.backend=cuda");
    return refused(more);
  };
  CHECK(cuda({"model.num_attention_heads=2"}) == "accepted");
  CHECK_THAT(cuda({"model.num_attention_heads=4"}), ContainsSubstring("makes heads 32 wide"));
  CHECK(refused({"model.num_attention_heads=4", "execution.backend=auto"}) == "accepted");
  CHECK_THAT(cuda({"gradients.w_group=2"}), ContainsSubstring("found 2 with 64 tokens a microbatch"));
  CHECK(cuda({"gradients.w_group=2", "training.micro_batch_size=2", "training.global_batch_size=8"}) == "accepted");
  CHECK(cuda({"gradients.w_group=2", "precision.compute=bf16"}) == "accepted");
}

TEST_CASE("W groups divide the microbatches and need one accumulated gradient and a W of its own") {
  CHECK(refused({"gradients.w_group=4"}) == "accepted");
  CHECK_THAT(refused({"gradients.w_group=3"}), ContainsSubstring("a divisor of the 4 microbatches of a step; the "
                                                                 "nearest is 2"));
  CHECK_THAT(refused({"gradients.w_group=2", "gradients.placement=arena"}), ContainsSubstring("\"accumulate\""));
  CHECK_THAT(refused({"gradients.w_group=2", "pipeline.backward=full"}), ContainsSubstring("\"split\""));
}

TEST_CASE("comments are allowed; a byte order mark, trailing commas and duplicates are refused with their place") {
  CHECK(refusal("// a run\n{\"model\": {} /* here */ }") == "accepted");
  CHECK_THAT(refusal("\xEF\xBB\xBF{}"), ContainsSubstring("byte order mark"));
  CHECK_THAT(refusal("{\"model\": {\n\"num_layers\": 4,\n}}"),
             ContainsSubstring("x.json:3:1: found a comma before the closing }"));
  CHECK_THAT(refusal(R"({"data": {"train": ["a",]}})"), ContainsSubstring("found a comma before the closing ]"));
  CHECK_THAT(refusal(R"({"model": {"num_layers": 4)"), ContainsSubstring("ends too early"));
  CHECK_THAT(refusal(""), ContainsSubstring("x.json is empty; wanted a JSON object"));
  CHECK_THAT(refusal(" \n"), ContainsSubstring("the JSON ends too early"));
  CHECK_THAT(refusal("[]"), ContainsSubstring("holds array; wanted one JSON object"));
  CHECK_THAT(refusal("{'model': 1}"), ContainsSubstring("x.json:1:2: not valid JSON"));
  CHECK_THAT(refusal(R"({"training": {"lr": NaN}})"), ContainsSubstring("not valid JSON"));
  CHECK_THAT(refusal(R"({"training": {"lr": 1, "seed": 2, "lr": 1}})"),
             ContainsSubstring("training.lr: found this key more than once"));
  CHECK_THAT(refusal(R"({"training": {"lr": 1}, "training": {"seed": 2}})"),
             ContainsSubstring("training: found this key more than once"));
}

TEST_CASE("all faults of a file come in one message, a line each") {
  const std::string message = refusal(
      R"({"model": {"hidden_siz": 64, "num_layers": 0}, "training": {"lr": "fast"}, "optimiser": {}, "fp8": {"margin": -1}})");
  CHECK_THAT(message, ContainsSubstring("x.json has 5 faults:"));
  CHECK(lines_of(message) == 5);
  CHECK_THAT(message, ContainsSubstring("model.hidden_siz: unknown key; the nearest is model.hidden_size."));
  CHECK_THAT(message,
             ContainsSubstring("model.num_layers: found 0, wanted an integer from 1 to 4096; the nearest is 1."));
  CHECK_THAT(message, ContainsSubstring("training.lr: found \"fast\", wanted an FP32 number from 0 to 1000000."));
  CHECK_THAT(message, ContainsSubstring("optimiser: unknown section; the nearest is optimizer."));
  CHECK_THAT(message, ContainsSubstring("fp8.margin: found -1"));
}

TEST_CASE("under fp8 only the widths that fail are listed, with the nearest that fit") {
  const std::string message =
      refused({"model.hidden_size=520", "model.ffn_hidden_size=1365", "training.seq_length=250"});
  CHECK(lines_of(message) == 3);
  CHECK_THAT(message, ContainsSubstring(
                          "model.hidden_size: found 520, fp8 needs a multiple of 16; the nearest are 512 and 528."));
  CHECK_THAT(message,
             ContainsSubstring(
                 "model.ffn_hidden_size: found 1365, fp8 needs a multiple of 16; the nearest are 1360 and 1376."));
  CHECK_THAT(message, ContainsSubstring("the nearest are 240 and 256."));
  CHECK_THAT(refused({"training.seq_length=255"}), ContainsSubstring("the nearest are 240 and 256."));
  CHECK_THAT(refused({"training.seq_length=1"}), ContainsSubstring("the nearest is 16."));
  CHECK_THAT(refused({"training.seq_length=250", "training.micro_batch_size=4"}),
             ContainsSubstring("the nearest are 248 and 252."));
  CHECK(refused({"training.seq_length=250", "training.micro_batch_size=8", "training.global_batch_size=8"}) ==
        "accepted");
  CHECK_THAT(refused({"model.hidden_size=480", "model.num_attention_heads=8"}),
             ContainsSubstring("heads 60 wide; fp8 needs a multiple of 16, the nearest is 6 heads."));
  CHECK(refused({"model.hidden_size=520", "model.ffn_hidden_size=1365", "training.seq_length=250",
                 "precision.compute=bf16"}) == "accepted");
  CHECK_THAT(refused({"model.hidden_size=100", "model.num_attention_heads=3", "precision.compute=bf16"}),
             ContainsSubstring("wanted a divisor of model.hidden_size 100; the nearest is 2."));
}

TEST_CASE("contradictions between keys are refused at the key that should change") {
  struct Case {
    std::vector<std::string> overrides;
    std::string words;
  };
  const std::vector<Case> cases = {
      {{"training.global_batch_size=7", "training.micro_batch_size=2"},
       "training.global_batch_size: found 7, wanted a multiple of micro_batch_size x parallel.data = 2 x 1 = 2; the "
       "nearest are 6 and 8."},
      {{"training.seq_length=512"},
       "training.seq_length: found 512, wanted at most model.max_position_embeddings 256."},
      {{"pipeline.schedule=zbv", "pipeline.virtual_pipeline_model_parallel_size=3"}, "zbv needs exactly 2 chunks"},
      {{"pipeline.virtual_pipeline_model_parallel_size=2"}, "1f1b needs exactly 1 chunk"},
      {{"pipeline.schedule=interleaved_1f1b", "pipeline.virtual_pipeline_model_parallel_size=2",
        "pipeline.pipeline_model_parallel_size=2", "training.global_batch_size=5"},
       "training.global_batch_size: interleaved_1f1b cannot divide 5 microbatches"},
      {{"model.num_layers=3", "pipeline.schedule=zbv", "pipeline.pipeline_model_parallel_size=2"},
       "model.num_layers: found 3, wanted a layer for each of the 4 stages"},
      {{"pipeline.pipeline_model_parallel_size=2", "pipeline.layers_per_stage=[1,2]"},
       "pipeline.layers_per_stage: found a sum of 3, wanted model.num_layers 4"},
      {{"pipeline.pipeline_model_parallel_size=2", "pipeline.layers_per_stage=[4]"},
       "found a list of 1, wanted an entry for each of the 2 stages"},
      {{"gradients.placement=arena", "pipeline.tape_slots=peak"},
       "pipeline.tape_slots: found \"peak\", gradients.placement arena"},
      {{"gradients.placement=copied", "gradients.dtype=bf16"},
       "gradients.dtype: found \"bf16\", gradients.placement copied"},
      {{"precision.compute=fp32", "execution.backend=cuda"}, "precision.compute fp32 runs only on \"cpu\""},
      {{"precision.compute=bf16", "head.precision=fp8_dynamic"}, "head.precision: found an fp8 head without"},
      {{"execution.gemm_table=t.json", "execution.backend=cpu"},
       "execution.gemm_table: has no effect under execution.backend cpu; remove it, or choose cuda."},
      {{"checkpoint.async=true"}, "checkpoint.dir: found none, wanted a folder with checkpoint.async true."},
      {{"precision.compute=bf16", "precision.bf16_layers=[0]"},
       "precision.bf16_layers: has no effect without precision.compute fp8"},
      {{"precision.compute=fp32", "precision.bf16_layers=[0]"}, "without precision.compute fp8"},
      {{"precision.bf16_layers=[1,4]"}, "precision.bf16_layers: found layer 4, wanted layers from 0 to 3"},
      {{"precision.bf16_layers=[2,1]"}, "precision.bf16_layers: found layer 1 after 2; wanted ascending layers."},
      {{"precision.bf16_layers=[0,2,2]"}, "precision.bf16_layers: found layer 2 twice"},
      {{"precision.bf16_layers=[-1]"}, "precision.bf16_layers: found [-1], wanted a list of integers from 0"},
      {{"precision.bf16_layers=3"}, "precision.bf16_layers: found 3, wanted a list of integers"},
      {{"training.lr=0.1", "training.min_lr=0.2", "training.lr_schedule=cosine"},
       "training.min_lr: found more than training.lr"},
      {{"training.min_lr=1e-5"}, "training.min_lr: has no effect under training.lr_schedule constant"},
      {{"training.lr_decay_iters=5"}, "training.lr_decay_iters: has no effect"},
      {{"training.lr_schedule=cosine", "training.lr_decay_iters=0"},
       "training.lr_decay_iters: found 0, wanted the step that reaches training.min_lr, at least 1."},
      {{"training.train_iters=0"}, "training.train_iters: found 0, which evaluates only"},
      {{"training.eval_interval=5"}, "training.eval_interval: has no effect without data.valid"},
      {{"training.eval_iters=5"}, "training.eval_iters: has no effect without data.valid"},
      {{"training.lr_warmup_iters=101"},
       "training.lr_warmup_iters: found 101, wanted at most training.train_iters 100"},
      {{"training.lr_schedule=cosine", "training.lr_warmup_iters=50", "training.lr_decay_iters=40"},
       "at least training.lr_warmup_iters 50"},
      {{"training.lr_schedule=wsd", "training.lr_warmup_iters=50", "training.lr_decay_iters=60"},
       "wanted at most the 50 steps"},
      {{"training.seq_length=65536", "model.max_position_embeddings=65536", "training.micro_batch_size=4096",
        "training.global_batch_size=4096"},
       "training.micro_batch_size: found 4096, which makes 268435456 tokens"},
  };
  for (const Case& c : cases) {
    const std::string message = refused(c.overrides);
    INFO(message);
    CHECK_THAT(message, ContainsSubstring(c.words));
    CHECK(lines_of(message) == 1);
  }
}

TEST_CASE("a key with a fault of its own does not cause a second line elsewhere") {
  const std::string message =
      refused({"model.hidden_size=-1", "training.micro_batch_size=0", "pipeline.schedule=zigzag"});
  INFO(message);
  CHECK(lines_of(message) == 3);
}

TEST_CASE("defaults follow from other keys") {
  CHECK(with({}).head.precision == HeadPrecision::kFp8Delayed);
  CHECK(with({"precision.compute=bf16"}).head.precision == HeadPrecision::kBf16);
  CHECK(with({"precision.compute=fp32"}).execution.backend == "cpu");
  CHECK(with({"precision.compute=bf16"}).execution.backend == "auto");
  CHECK(with({"pipeline.schedule=zbv"}).pipeline.virtual_pipeline_model_parallel_size == 2);
  CHECK(with({}).pipeline.tape_slots == TapeSlots::kPeak);
  CHECK(with({"gradients.placement=copied"}).pipeline.tape_slots == TapeSlots::kPerMicrobatch);
  CHECK(with({"training.lr_schedule=cosine"}).training.lr_decay_iters == 100);
  CHECK(with({"training.lr_schedule=wsd"}).training.lr_decay_iters == 10);
  const Config c = with({"model.num_layers=7", "pipeline.schedule=zbv", "pipeline.pipeline_model_parallel_size=2"});
  CHECK(c.pipeline.layers_per_stage == std::vector<int>{2, 2, 2, 1});
  CHECK(c.shape().stages() == 4);
}

TEST_CASE("schedules are known by PyTorch's names too, case-blind") {
  for (const char* name : {"1F1B", "1f1b"}) {
    CHECK(with({std::string("pipeline.schedule=\"") + name + "\""}).pipeline.schedule == ScheduleKind::k1F1B);
  }
  for (const char* name : {"Interleaved1F1B", "interleaved1f1b", "INTERLEAVED_1F1B"}) {
    CHECK(with({std::string("pipeline.schedule=") + name}).pipeline.schedule == ScheduleKind::kInterleaved1F1B);
  }
  for (const char* name : {"ZBVZeroBubble", "zb_v", "ZBV", "zbvzerobubble"}) {
    CHECK(with({std::string("pipeline.schedule=") + name}).pipeline.schedule == ScheduleKind::kZbv);
  }
  CHECK(with({"pipeline.schedule=InterleavedZeroBubble"}).pipeline.schedule == ScheduleKind::kZb1p);
  CHECK(with({"pipeline.schedule=GPipe"}).pipeline.schedule == ScheduleKind::kGpipe);
  CHECK_THAT(refused({"pipeline.schedule=zb2p"}), ContainsSubstring("the nearest is zb1p."));
  CHECK_THAT(refused({"pipeline.schedule=dualpipe"}),
             ContainsSubstring("wanted one of \"1f1b\", \"interleaved_1f1b\""));
}

TEST_CASE("overrides replace the file's values, the last one wins, and their form is checked") {
  CHECK(parse_config(R"({"training": {"lr": 1}})", "x", {"training.lr=2", "training.lr=3e-1"}).training.lr == 0.3);
  CHECK(parse_config(R"({"data": {"valid": "v.bin"}})", "x", {"data.valid="}).data.valid.empty());
  CHECK(with({"data.train=a=b.bin"}).data.train == std::vector<std::string>{"a=b.bin"});
  CHECK_THROWS_AS(with({"training.lr"}), UsageError);
  CHECK_THROWS_AS(with({"lr=3"}), UsageError);
  CHECK_THROWS_AS(with({".lr=3"}), UsageError);
  CHECK_THROWS_AS(with({"training.=3"}), UsageError);
  CHECK_THAT(refused({"training.lr=nan"}), ContainsSubstring("training.lr: found \"nan\""));
  CHECK_THAT(refused({"training.lr=1e999"}), ContainsSubstring("training.lr: found"));
  CHECK_THAT(refused({"training.lr="}), ContainsSubstring("training.lr: found \"\""));
}

TEST_CASE("a number is checked as the float that will be used, and the nearest one that is allowed is named") {
  const std::vector<std::pair<std::string, std::string>> cases = {{"optimizer.adam_beta1=0.999999999", "0.99999994"},
                                                                  {"optimizer.adam_beta2=1", "0.99999994"},
                                                                  {"optimizer.adam_eps=1e-46", "1.40129846e-45"},
                                                                  {"optimizer.adam_eps=0", "1.40129846e-45"},
                                                                  {"optimizer.clip_grad=1e-60", "1.40129846e-45"},
                                                                  {"training.lr=1e-50", "1.40129846e-45"},
                                                                  {"optimizer.weight_decay=-1e-60", "0"},
                                                                  {"training.lr=1e300", "1000000"}};
  for (const auto& [override_text, nearest] : cases) {
    INFO(override_text);
    CHECK_THAT(refused({override_text}), ContainsSubstring("; the nearest is " + nearest + "."));
    CHECK(refused({override_text.substr(0, override_text.find('=') + 1) + nearest}) == "accepted");
  }
  for (const KeySpec& key : key_table()) {
    if (key.type == ValueType::kNumber && key.section != "runtime") CHECK(key.single);
  }
}

TEST_CASE("every number of steps that is accepted fits the step's 32 bits") {
  CHECK_THAT(refused({"training.train_iters=4294967296"}),
             ContainsSubstring("wanted an integer from 0 to 4000000000; the nearest is 4000000000."));
  CHECK(with({"training.train_iters=4000000000"}).training.train_iters == 4000000000);
}

TEST_CASE("text that JSON cannot hold is refused with its place: deep nesting, NUL, other encodings, huge numbers") {
  const std::string deep(200000, '[');
  CHECK_THAT(refusal(deep), ContainsSubstring("x.json nests deeper than 64 levels"));
  CHECK_THAT(refusal("{\"model\": " + deep), ContainsSubstring("nests deeper than 64 levels"));
  CHECK_THAT(refused({"data.train=" + deep}), ContainsSubstring("nests deeper than 64 levels"));
  CHECK(refused({"data.train=" + deep}).size() < 300);
  CHECK_THAT(refusal(std::string("{}\n\0", 4)), ContainsSubstring("x.json:2:1: found a NUL byte"));
  CHECK_THAT(refusal("// caf\xE9\n{}"), ContainsSubstring("x.json:1:7: found a byte that is not UTF-8"));
  CHECK_THAT(refused({"report.dir=caf\xE9"}), ContainsSubstring("--set report.dir: found a value that is not UTF-8"));
  CHECK(with({"report.dir=caf\xC3\xA9"}).report.dir == "caf\xC3\xA9");
  CHECK_THAT(refusal(R"({"training": {"lr": 1e999}})"),
             ContainsSubstring("x.json: found the number '1e999', wanted one below 1.8e308."));
  CHECK(refused({std::string(10000, 'k') + "." + std::string(10000, 'k') + "=1"}).size() < 400);
}

TEST_CASE("UTF-8 is what RFC 3629 says it is") {
  for (const char* good : {"", "a", "\xC2\x80", "\xDF\xBF", "\xE0\xA0\x80", "\xED\x9F\xBF", "\xEF\xBF\xBF",
                           "\xF0\x90\x80\x80", "\xF4\x8F\xBF\xBF"}) {
    CHECK(is_utf8(good));
  }
  for (const char* bad : {"\x80", "\xC1\xBF", "\xC2", "\xC2\x41", "\xE0\x9F\xBF", "\xED\xA0\x80", "\xE1\x80",
                          "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF"}) {
    CHECK(first_invalid_utf8(std::string("ab") + bad) == 2);
  }
}

TEST_CASE("an unreadable config file is a config error with its path") {
  CHECK_THROWS_WITH(load_config("/nonexistent/a.json"), ContainsSubstring("/nonexistent/a.json"));
  CHECK_THROWS_WITH(load_config("/"), ContainsSubstring("is a directory, wanted a file"));
  CHECK_THROWS_WITH(load_config("/dev/null"), ContainsSubstring("is not a regular file"));
}

TEST_CASE("the learning rate follows its schedule exactly at the corners") {
  TrainingSection t = with({"training.lr=1", "training.lr_warmup_iters=10", "training.lr_schedule=linear",
                            "training.min_lr=0.5", "training.lr_decay_iters=50"})
                          .training;
  CHECK(learning_rate(t, 1) == 0.1);
  CHECK(learning_rate(t, 10) == 1);
  CHECK(learning_rate(t, 30) == 0.75);
  CHECK(learning_rate(t, 50) == 0.5);
  CHECK(learning_rate(t, 1000) == 0.5);
  t.lr_schedule = LrSchedule::kCosine;
  CHECK(learning_rate(t, 10) == 1);
  CHECK(std::abs(learning_rate(t, 30) - 0.75) < 1e-15);
  CHECK(learning_rate(t, 20) > 0.875);
  CHECK(learning_rate(t, 50) == 0.5);
  t.lr_schedule = LrSchedule::kWsd;
  t.lr_decay_iters = 20;
  CHECK(learning_rate(t, 80) == 1);
  CHECK(learning_rate(t, 90) == 0.75);
  CHECK(learning_rate(t, 100) == 0.5);
  t.lr_schedule = LrSchedule::kConstant;
  t.lr_warmup_iters = 0;
  CHECK(learning_rate(t, 1) == 1);
  CHECK(learning_rate(t, 100) == 1);
}

TEST_CASE("no schedule wastes a step on a learning rate of zero but the one that reaches min_lr") {
  for (const char* schedule : {"linear", "cosine"}) {
    const std::string key = std::string("training.lr_schedule=") + schedule;
    const TrainingSection warm =
        with({"training.lr=1", "training.train_iters=4", "training.lr_warmup_iters=4", key}).training;
    CHECK(learning_rate(warm, 3) == 0.75);
    CHECK(learning_rate(warm, 4) == 1);
  }
  for (const int steps : {1, 5, 9}) {
    const TrainingSection wsd =
        with({"training.lr=1", "training.train_iters=" + std::to_string(steps), "training.lr_schedule=wsd"}).training;
    for (int step = 1; step <= steps; ++step) CHECK(learning_rate(wsd, step) == 1);
  }
}

TEST_CASE("the committed schema and key page are the ones the key table makes") {
  const std::filesystem::path root = QE_SOURCE_DIR;
  CHECK(file_text(root / "configs/schema/config.schema.json") == config_schema());
  CHECK(file_text(root / "docs/config.md") == config_markdown());
  for (const KeySpec& key : key_table()) CHECK_THAT(config_help(), ContainsSubstring("\n  " + key.name + " = "));
}

TEST_CASE("every committed config is valid") {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::path(QE_SOURCE_DIR) / "configs")) {
    if (entry.path().extension() != ".json") continue;
    INFO(entry.path().string());
    CHECK_NOTHROW(load_config(entry.path().string()));
    ++count;
  }
  CHECK(count > 0);
}
