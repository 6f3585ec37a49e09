// Checkpoint files without a model: formats, what a reader trusts, what a resumed run must have in common with its
// checkpoint.
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>

#include "app/checkpoint/checkpoint.h"
#include "app/checkpoint/resume.h"
#include "app/checkpoint/tensor_reader.h"
#include "core/error.h"
#include "core/random.h"
#include "kernels/cpu/thread_transport.h"
#include "tests/catch.h"
#include "tests/unit/scratch.h"

namespace qe {
namespace {

namespace fs = std::filesystem;

std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
void put(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

std::vector<unsigned char> bytes_for(const StoredTensor& t, std::uint64_t seed) {
  std::vector<unsigned char> bytes(t.bytes());
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<unsigned char>(philox(seed, 0, i).w[0] & 0x3f);
  }
  return bytes;
}

const std::vector<StoredTensor> kTensors{{"master.a", DType::kF32, {2, 3}, 0},
                                         {"moment1.a", DType::kBF16, {1, 5}, 0},
                                         {"fp8.a.scale", DType::kF32, {1, 1}, 0}};

// A published checkpoint of two files, each with kTensors under names of its own.
void make_checkpoint(const std::string& dir, std::int64_t step, const Config& config = parse_config("{}", "t.json")) {
  const auto disk = make_disk_storage();
  const std::string folder = path_in(dir, step_name(step) + ".tmp");
  disk->make_directory(folder);
  Manifest m;
  m.position.step = step;
  m.position.data = {1, 17};
  m.position.final_train_loss = 1.0 / 3;
  m.config = nlohmann::ordered_json::parse(dump_config(config));
  m.environment = {{"qeffect", "0.1.0"}};
  m.train_files = {{"a.bin", 1000, 3024}};
  for (const std::string file : {"rank_00000.safetensors", "rank_00001.safetensors"}) {
    std::vector<StoredTensor> tensors = kTensors;
    for (StoredTensor& t : tensors) t.name += file.substr(4, 6);
    const auto out = disk->create(path_in(folder, file));
    std::vector<unsigned char> bytes;
    const WrittenFile written = write_safetensors(*out, tensors, [&](std::size_t i) {
      bytes = bytes_for(tensors[i], static_cast<std::uint64_t>(step));
      return Bytes(bytes);
    });
    m.files.push_back({file, written.bytes, written.digest});
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const StoredTensor& t = tensors[i];
      m.tensors.push_back({t.name, t.dtype, t.shape, {0, 0}, t.shape, file, written.tensors[i]});
    }
  }
  m.parameters_xxh3 = parameters_digest(m.tensors);
  disk->write_file(path_in(folder, kManifestName), manifest_text(m));
  publish(*disk, dir, step, true);
}

// What two ranks find together; they must find the same.
struct Finding {
  std::optional<FoundCheckpoint> found;
  std::string error;
};
Finding find(const std::string& dir, const std::string& wanted) {
  Finding result[2];
  ThreadWorld world(2, 1, 30);
  run_ranks(world, [&](int rank) {
    CpuDevice device;
    const auto transport = world.connect(rank, device);
    try {
      result[rank].found = find_checkpoint(*transport, dir, wanted);
    } catch (const CheckpointError& e) {
      result[rank].error = e.what();
    }
    transport->barrier(Group::kWorld);
  });
  CHECK(result[0].error == result[1].error);
  CHECK(result[0].found.has_value() == result[1].found.has_value());
  if (result[0].found && result[1].found) CHECK(result[0].found->folder == result[1].found->folder);
  return result[0];
}

// A manifest's text after a change, with a digest that fits again.
std::string resealed(std::string text, const std::function<void(nlohmann::ordered_json&)>& change) {
  auto j = nlohmann::ordered_json::parse(text);
  j.erase("manifest_xxh3");
  change(j);
  const std::string rest = j.dump(1).substr(2) + "\n";
  return "{\"manifest_xxh3\": \"" + digest_of({reinterpret_cast<const unsigned char*>(rest.data()), rest.size()}) +
         "\",\n" + rest;
}

std::string refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const CheckpointError& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("safetensors files read back by name, and start their buffer on eight bytes") {
  const Scratch dir;
  const auto disk = make_disk_storage();
  const auto out = disk->create(dir / "a.safetensors");
  std::vector<unsigned char> source;
  const WrittenFile written = write_safetensors(*out, kTensors, [&](std::size_t i) {
    source = bytes_for(kTensors[i], 5);
    return Bytes(source);
  });
  const InputFile file(dir / "a.safetensors");
  CHECK(file.size() == written.bytes);
  CHECK(digest_of_file(file) == written.digest);
  const auto tensors = read_safetensors_header(file);
  REQUIRE(tensors.size() == 3);
  CHECK(tensors[0].offset % 8 == 0);
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(tensors[i].name == kTensors[i].name);
    CHECK(tensors[i].dtype == kTensors[i].dtype);
    CHECK(tensors[i].shape == kTensors[i].shape);
    std::vector<unsigned char> bytes(tensors[i].bytes());
    file.read(tensors[i].offset, bytes);
    CHECK(bytes == bytes_for(kTensors[i], 5));
  }
}

TEST_CASE("headers that are not sound are refused by file, never followed") {
  const Scratch dir;
  const auto with_header = [&](const std::string& header, std::size_t buffer) {
    std::string text(8, '\0');
    for (std::size_t i = 0; i < 8; ++i) text[i] = static_cast<char>(header.size() >> (8 * i) & 255);
    put(dir / "x.safetensors", text + header + std::string(buffer, 'b'));
    return refusal([&] { read_safetensors_header(InputFile(dir / "x.safetensors")); });
  };
  const std::string good = R"({"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}})";
  CHECK(with_header(good, 8).empty());
  CHECK_THAT(with_header(good, 9), ContainsSubstring("do not fill it"));
  CHECK_THAT(with_header(good, 7), ContainsSubstring("x.safetensors"));
  for (
      const char* bad :
      {"", "[]", "{", R"({"a":1})", R"({"a":{}})", R"({"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0]}})",
       R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
       R"({"a":{"dtype":"F64","shape":[1,1],"data_offsets":[0,8]}})",
       R"({"a":{"dtype":"F32","shape":[1,2],"data_offsets":[8,0]}})",
       R"({"a":{"dtype":"F32","shape":[1,-2],"data_offsets":[0,8]}})",
       R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]}})",
       R"({"a":{"dtype":"F32","shape":[1,1],"data_offsets":[4,8]}})",
       R"({"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1,1],"data_offsets":[4,8]}})",
       R"({"a":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1,1],"data_offsets":[4,8]}})"}) {
    INFO(bad);
    CHECK_THAT(with_header(bad, 8), ContainsSubstring("x.safetensors"));
  }
  for (const std::string& bytes : {std::string(), std::string(7, '\0'), std::string(8, '\xff')}) {
    put(dir / "x.safetensors", bytes);
    CHECK_THAT(refusal([&] { read_safetensors_header(InputFile(dir / "x.safetensors")); }),
               ContainsSubstring("x.safetensors"));
  }
}

TEST_CASE("every field of a manifest reads back, a loss to the same bits") {
  const Scratch dir;
  make_checkpoint(dir / "c", 3);
  const std::string text = text_of(dir / "c/step_00000003/manifest.json");
  const Manifest m = parse_manifest(text, "m");
  CHECK(manifest_text(m) == text);
  CHECK(m.position.final_train_loss == 1.0 / 3);
  CHECK_FALSE(m.position.initial_train_loss);
  CHECK(m.position.data == DataPosition{1, 17});
  Manifest skipped = m;
  skipped.position.final_train_loss = std::numeric_limits<double>::quiet_NaN();
  CHECK(std::isnan(*parse_manifest(manifest_text(skipped), "m").position.final_train_loss));
}

TEST_CASE("a manifest of another version, or with a key that this one does not know, is refused by name") {
  const Scratch dir;
  make_checkpoint(dir / "c", 3);
  const std::string text = text_of(dir / "c/step_00000003/manifest.json");
  const auto refused = [&](const std::function<void(nlohmann::ordered_json&)>& change) {
    return refusal([&] { parse_manifest(resealed(text, change), "m.json"); });
  };
  CHECK(refused([](auto&) {}).empty());
  CHECK_THAT(refused([](auto& j) { j["schema_version"] = 0; }), ContainsSubstring("found schema_version 0, wanted 1"));
  CHECK_THAT(refused([](auto& j) { j["schema_version"] = 999; }), ContainsSubstring("schema_version 999, wanted 1"));
  CHECK_THAT(refused([](auto& j) { j.erase("schema_version"); }), ContainsSubstring("schema_version none, wanted 1"));
  CHECK_THAT(refused([](auto& j) { j["mood"] = 1; }), ContainsSubstring("\"mood\""));
  CHECK_THAT(refused([](auto& j) { j["position"].erase("epoch"); }), ContainsSubstring("lacks \"epoch\""));
  CHECK_THAT(refused([](auto& j) { j["position"]["step"] = "3"; }), ContainsSubstring("m.json"));
  CHECK_THAT(refused([](auto& j) { j["files"][0]["name"] = "../x"; }), ContainsSubstring("../x"));
}

TEST_CASE("one byte flipped, cut off, all cut off or the file gone: named, and latest falls back") {
  const Scratch dir;
  const std::string store = dir / "c";
  make_checkpoint(store, 1);
  make_checkpoint(store, 2);
  REQUIRE(find(store, "latest").found->manifest.position.step == 2);
  const std::string folder = path_in(store, step_name(2));
  for (const std::string name : {"manifest.json", "rank_00000.safetensors", "rank_00001.safetensors"}) {
    const std::string path = path_in(folder, name), sound = text_of(path);
    std::vector<std::optional<std::string>> damages{std::nullopt, "", sound.substr(0, sound.size() - 1), sound + " "};
    for (const std::size_t at : {std::size_t{0}, std::size_t{7}, std::size_t{21}, std::size_t{60}, sound.size() / 2,
                                 sound.size() - 2, sound.size() - 1}) {
      for (const int bit : {1, 128}) {
        std::string flipped = sound;
        flipped[at] = static_cast<char>(flipped[at] ^ bit);
        damages.emplace_back(flipped);
      }
    }
    for (const auto& damage : damages) {
      fs::remove(path);
      if (damage) put(path, *damage);
      INFO(name << ", " << (damage ? std::to_string(damage->size()) + " bytes" : "gone"));
      const Finding latest = find(store, "latest");
      REQUIRE(latest.found);
      CHECK(latest.found->manifest.position.step == 1);
      REQUIRE(latest.found->passed_over.size() == 1);
      CHECK_THAT(latest.found->passed_over[0], ContainsSubstring(path));
      const Finding named = find(store, "2");
      CHECK_FALSE(named.found);
      CHECK_THAT(named.error, ContainsSubstring(path));
    }
    put(path, sound);
  }
  CHECK(find(store, "latest").found->manifest.position.step == 2);
  CHECK(find(store, folder).found->manifest.position.step == 2);
}

TEST_CASE("a pointer that is damaged or gone, and unfinished folders, do not hide what is complete") {
  const Scratch dir;
  const std::string store = dir / "c", pointer = path_in(store, "latest");
  make_checkpoint(store, 1);
  make_checkpoint(store, 2);
  for (const char* text : {"", "step_00000002", "step_2\n", "x\n", "../step_00000001\n"}) {
    put(pointer, text);
    CHECK(find(store, "latest").found->manifest.position.step == 2);
  }
  fs::remove(pointer);
  CHECK(find(store, "latest").found->manifest.position.step == 2);
  put(pointer, "step_00000001\n");  // 2 was published, and its run died before it said so
  const Finding announced = find(store, "latest");
  CHECK(announced.found->manifest.position.step == 1);
  REQUIRE(announced.found->passed_over.size() == 1);
  CHECK_THAT(announced.found->passed_over[0], ContainsSubstring(path_in(store, "step_00000002") + " is newer than"));
  put(pointer, "step_00000007\n");
  CHECK(find(store, "latest").found->manifest.position.step == 2);
  fs::create_directories(path_in(store, "step_00000009.tmp"));
  put(path_in(store, "step_00000009.tmp/rank_00000.safetensors"), "half");
  const Finding found = find(store, "latest");
  CHECK(found.found->manifest.position.step == 2);
  CHECK_THAT(found.found->passed_over[0], ContainsSubstring("step_00000009.tmp was not finished"));
}

TEST_CASE("what is not there is refused with what is; only \"latest\" may start afresh") {
  const Scratch dir;
  const std::string store = dir / "c";
  CHECK_FALSE(find(store, "latest").found);
  CHECK(find(store, "latest").error.empty());
  CHECK_THAT(find(store, "7").error, ContainsSubstring("has no checkpoint"));
  fs::create_directories(store);
  CHECK_FALSE(find(store, "latest").found);
  make_checkpoint(store, 3);
  make_checkpoint(store, 6);
  CHECK_THAT(find(store, "7").error, ContainsSubstring("has steps 3 and 6"));
  CHECK_THAT(find(store, dir / "elsewhere").error, ContainsSubstring("elsewhere"));
  CHECK_THAT(find(store, store).error, ContainsSubstring("a folder of checkpoints, with steps 3 and 6"));
  for (const std::int64_t step : {3, 6}) fs::remove(path_in(store, step_name(step) + "/manifest.json"));
  CHECK_THAT(find(store, "latest").error, ContainsSubstring("step_00000003/manifest.json"));
  CHECK_THAT(find(store, "latest").error, ContainsSubstring("step_00000006/manifest.json"));
}

TEST_CASE("a folder that ranks do not share, or that cannot be written, is refused before training") {
  const Scratch dir;
  std::string errors[2];
  const auto probe = [&](const std::string& first, const std::string& second) {
    ThreadWorld world(2, 1, 30);
    run_ranks(world, [&](int rank) {
      CpuDevice device;
      const auto transport = world.connect(rank, device);
      const auto disk = make_disk_storage();
      errors[rank].clear();
      try {
        probe_shared_folder(*disk, *transport, rank == 0 ? first : second);
      } catch (const CheckpointError& e) {
        errors[rank] = e.what();
      }
      transport->barrier(Group::kWorld);
    });
    CHECK(errors[0] == errors[1]);
    return errors[0];
  };
  CHECK(probe(dir / "a", dir / "a").empty());
  CHECK(fs::is_empty(dir / "a"));
  CHECK_THAT(probe(dir / "a", dir / "b"), ContainsSubstring("rank 1: ") && ContainsSubstring("is not shared"));
  put(dir / "file", "");
  CHECK_THAT(probe(dir / "file", dir / "file"), ContainsSubstring("rank 0: Cannot") && ContainsSubstring(dir / "file"));
}

TEST_CASE("a full device is an error with its path") {
  if (!fs::exists("/dev/full")) return;
  const auto disk = make_disk_storage();
  CHECK_THAT(refusal([&] { disk->write_file("/dev/full", "x"); }),
             ContainsSubstring("/dev/full") && ContainsSubstring("No space left"));
}

TEST_CASE("what must match is refused as one list; cut, schedule, mode and length are noted") {
  const Config saved = parse_config("{}", "t.json");
  const Scratch dir;
  make_checkpoint(dir / "c", 3, saved);
  const Manifest m = open_checkpoint(dir / "c/step_00000003");
  const std::vector<DataFile> same{{"a.bin", 1000, 3024}};
  const auto compare = [&](const std::vector<std::string>& now, const std::vector<std::string>& overrides = {},
                           const std::vector<DataFile>& files = {{"a.bin", 1000, 3024}}) {
    ResumeRecord record;
    const std::string error = refusal(
        [&] { record = compare_for_resume(m, "step_00000003", parse_config("{}", "t.json", now), files, overrides); });
    return std::pair(record, error);
  };
  CHECK(compare({}).second.empty());
  CHECK(compare({}).first.changed.empty());
  const auto free = compare({"pipeline.schedule=zbv", "pipeline.pipeline_model_parallel_size=2", "execution.mode=eager",
                             "training.train_iters=9", "gradients.placement=arena", "parallel.data=1"});
  INFO(free.second);
  CHECK(free.second.empty());
  CHECK(free.first.changed.size() == 8);  // chunks, tape slots and layers a stage follow
  CHECK(compare({"fp8.reduce_amax=dp", "parallel.data=2"}).second.empty());

  const auto several = compare({"training.lr=1e-3", "training.seed=2", "optimizer.weight_decay=0",
                                "training.global_batch_size=8", "fp8.margin=1", "training.lr_warmup_iters=3"},
                               {}, {{"b.bin", 1000, 3024}});
  for (const char* key : {"training.lr: stored 0.0003, now 0.001", "training.seed", "optimizer.weight_decay",
                          "training.global_batch_size", "fp8.margin", "training.lr_warmup_iters", "data.train"}) {
    CHECK_THAT(several.second, ContainsSubstring(key));
  }
  CHECK_THAT(several.second, ContainsSubstring("differs in 7 places:"));
  const auto half = compare({"training.lr=1e-3", "training.seed=2"}, {"training.lr"});
  CHECK_THAT(half.second, ContainsSubstring("differs in 1 place:") && ContainsSubstring("training.seed"));
  const auto named = compare({"training.lr=1e-3"}, {"training.lr", "training.seed"});
  REQUIRE(named.first.overridden.size() == 1);
  CHECK((named.first.overridden[0].stored == "0.0003" && named.first.overridden[0].now == "0.001"));
  CHECK_FALSE(named.first.data_restarted);

  for (const char* fixed :
       {"model.num_layers=5", "model.hidden_size=256", "fp8.amax_history_len=4", "precision.compute=bf16",
        "optimizer.moments_dtype=bf16", "head.precision=bf16", "precision.bf16_layers=[1]"}) {
    const std::string key = std::string(fixed).substr(0, std::string(fixed).find('='));
    CHECK_THAT(compare({fixed}, {key}).second, ContainsSubstring(key) && ContainsSubstring("no override"));
  }
  // A file of another size, one more, one less; and read from the beginning when that is wanted.
  for (const std::vector<DataFile>& files :
       {std::vector<DataFile>{{"a.bin", 1001, 3026}}, {{"a.bin", 1000, 3024}, {"b.bin", 9, 1042}}, {}}) {
    CHECK_THAT(compare({}, {}, files).second, ContainsSubstring("data.train"));
    CHECK(compare({}, {"data.train"}, files).first.data_restarted);
  }
  CHECK_THAT(compare({"training.train_iters=2"}).second, ContainsSubstring("step 3 is done"));
  CHECK_THROWS_AS(check_override_names({"training.l"}), UsageError);
}

TEST_CASE("a stored key that this version does not know is refused, as is one that it misses") {
  const Scratch dir;
  make_checkpoint(dir / "c", 3);
  Manifest m = open_checkpoint(dir / "c/step_00000003");
  const Config config = parse_config("{}", "t.json");
  m.config["fp8"]["amax_bias"] = 2;
  CHECK_THAT(refusal([&] { compare_for_resume(m, "c", config, m.train_files, {}); }),
             ContainsSubstring("fp8.amax_bias: stored 2, and this version has no such key"));
  m.config["fp8"].erase("amax_bias");
  m.config["fp8"].erase("margin");
  CHECK_THAT(refusal([&] { compare_for_resume(m, "c", config, m.train_files, {}); }),
             ContainsSubstring("fp8.margin: stored null, now 0"));
}

TEST_CASE("products that both runs compute must be computed alike, unless that is overridden by name") {
  const Scratch dir;
  make_checkpoint(dir / "c", 3);
  Manifest m = open_checkpoint(dir / "c/step_00000003");
  m.gemm_choices = {{"a", "1"}, {"b", "2"}};
  const Manifest again = parse_manifest(manifest_text(m), "manifest.json");
  CHECK(again.gemm_choices == m.gemm_choices);
  const auto compare = [&](const std::vector<GemmChoice>& now, const std::vector<std::string>& overrides) {
    ResumeRecord record;
    const std::string error = refusal([&] { compare_gemm_choices(again, "c", now, overrides, record); });
    return error.empty() ? std::to_string(record.overridden.size()) : error;
  };
  CHECK(compare({{"b", "2"}, {"c", "3"}}, {}) == "0");
  CHECK(compare({}, {}) == "0");  // the CPU has one way
  CHECK_THAT(compare({{"a", "1"}, {"b", "9"}}, {}), ContainsSubstring("differs in 1 place:") &&
                                                        ContainsSubstring("b, stored algorithm 2, now 9") &&
                                                        ContainsSubstring("--override gemm_choices"));
  check_override_names({"gemm_choices"});
  CHECK(compare({{"b", "9"}}, {"gemm_choices"}) == "1");
}

TEST_CASE("names of checkpoints are exact") {
  CHECK(step_name(7) == "step_00000007");
  CHECK(step_name(1234567890) == "step_1234567890");
  CHECK(step_of_name("step_1234567890") == 1234567890);
  for (const char* other : {"step_7", "step_00000007.tmp", "step_0000000x", "step_-0000007", "step_", "latest"}) {
    CHECK_FALSE(step_of_name(other));
  }
}

}  // namespace qe
