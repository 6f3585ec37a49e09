#include <algorithm>
#include <filesystem>

#include "app/checkpoint/save_folder.h"
#include "core/error.h"

namespace qe {

std::vector<std::string> all_or_none(Transport& transport, const std::function<std::string()>& mine) {
  std::string text;
  try {
    text = "+" + mine();
  } catch (const CheckpointError& e) {
    text = std::string("-") + e.what();
  } catch (const Error&) {
    throw;  // takes the job down under its own name
  } catch (const std::exception& e) {
    text = std::string("-") + e.what();
  }
  std::vector<std::string> all = transport.exchange(text, Group::kWorld);
  const bool all_alike = std::all_of(all.begin(), all.end(), [&](const std::string& s) { return s == all.front(); });
  if (all_alike && text.starts_with('-')) throw CheckpointError(text.substr(1));
  std::string errors;
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].starts_with('-')) {
      errors += (errors.empty() ? "rank " : "\nrank ") + std::to_string(r) + ": " + all[r].substr(1);
    }
    all[r].erase(0, 1);
  }
  if (!errors.empty()) throw CheckpointError(errors);
  return all;
}

void probe_shared_folder(Storage& storage, Transport& transport, const std::string& dir) {
  const bool leads = transport.rank(Group::kWorld) == 0;
  const std::string path = path_in(dir, "shared.tmp");
  const std::string token = all_or_none(transport, [&]() -> std::string {
                              if (!leads) return "";
                              storage.make_directory(dir);
                              const std::string text = std::to_string(
                                  std::filesystem::file_time_type::clock::now().time_since_epoch().count());
                              storage.write_file(path, text);
                              return text;
                            }).front();
  all_or_none(transport, [&]() -> std::string {
    std::string found;
    try {
      found = read_text_file(path);
    } catch (const CheckpointError&) {
      found.clear();  // not there is the same as another one
    }
    if (found == token) return "";
    throw CheckpointError("checkpoint.dir " + dir + " is not shared: this rank does not see what rank 0 wrote to " +
                          path + "; name a folder that all hosts have in common.");
  });
  all_or_none(transport, [&]() -> std::string {
    if (leads) storage.remove(path);
    return "";
  });
}

SavedCheckpoint save_checkpoint(Storage& storage, Transport& transport, PipelineRank& rank, const std::string& dir,
                                const Retention& retention, Manifest about) {
  SaveFolder folder(storage, transport, rank, dir, retention, std::move(about));
  folder.open([] {});
  const SavedCheckpoint saved = folder.publish([&]() -> std::string {
    if (!folder.rank_writes()) return "";
    const std::vector<StateEntry> entries = rank.state();
    std::size_t largest = 0;
    for (const StateEntry& e : entries) largest = std::max(largest, e.view.bytes());
    const HostMemory memory = rank.allocate_host(largest);  // one tensor at a time
    return folder.write_file(entries, [&](std::size_t i) {
      const std::span<unsigned char> bytes(memory.get(), entries[i].view.bytes());
      rank.read(entries[i], bytes);
      return Bytes(bytes);
    });
  });
  all_or_none(transport, [&]() -> std::string {
    folder.remove_aside();
    return "";
  });
  return saved;
}

}  // namespace qe
