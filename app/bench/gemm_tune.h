// Times what the library proposes for a matrix product and says which algorithm to keep. Owns the method; the file that
// the answers go to is gemm_table's.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "app/gemm_table.h"

namespace qe {

// One answer a product, in order of their names, told as soon as it is known. Products of one name differ in what is
// added, and are timed in turn. Every proposal is replayed from a graph, rounds of all of them in turn, over copies of
// the matrices that no cache can hold together, because a step finds its weights in no cache either; the median round
// counts.
void tune_gemms(Device&, Ops&, GemmChooser&, std::span<const GemmArgs>,
                const std::function<void(const GemmTableEntry&)>& tell);

// Which one is kept: the fastest that gives the same bytes twice where it is 2 % faster than the first, else the first.
std::size_t pick_algorithm(const std::vector<double>& us, const std::function<bool(std::size_t)>& repeats);

}  // namespace qe
