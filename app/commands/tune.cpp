// bench --tune: the products of a config, timed one after another into a tune file.
#include <cstdio>
#include <filesystem>

#include "app/bench/gemm_tune.h"
#include "app/commands/commands.h"
#include "app/pipeline_plan.h"
#include "app/plan_memory.h"
#include "core/error.h"

namespace qe {

int run_tune(const Config& config, const std::string& path) {
  std::error_code ignored;
  std::vector<GemmTable> tables;
  if (std::filesystem::exists(path, ignored)) tables = read_gemm_tables(path);
  Backend backend = make_backend(config.execution.backend);
  GemmChooser* chooser = gemm_chooser(backend);
  if (chooser == nullptr) {
    throw ConfigError(
        "execution.backend is cpu, or auto without a GPU, and the CPU backend computes every product in one way; "
        "bench --tune wants cuda, on a machine with a GPU.");
  }
  const GemmPlatform platform = chooser->gemm_platform();
  std::printf("%s, %d multiprocessors, %s\n", platform.device.c_str(), platform.multiprocessors,
              platform.library.c_str());
  std::printf("%11s %11s %7s  product\n", "first us", "best us", "ratio");
  const std::vector<GemmArgs> products =
      matrix_products(make_rank_config(config), make_rank_plan(config), config.parallel.data);
  tune_gemms(*backend.device, *backend.ops, *chooser, products, [&](const GemmTableEntry& entry) {
    std::printf("%11.2f %11.2f %7.3f  %s\n", entry.first_us, entry.us, entry.first_us / entry.us,
                entry.product.c_str());
    std::fflush(stdout);
    put_entry(tables, platform, entry);
    write_gemm_tables(path, tables);  // so that a run cut short has what it found
  });
  return 0;
}

}  // namespace qe
