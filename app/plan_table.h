// Tables and quantities as plans print them. Owns formatting only.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace qe {

// Rows of cells, the first is the heading; a column is as wide as its widest cell. Numbers stand to the right.
std::string table(const std::vector<std::vector<std::string>>& rows);

std::string grouped(std::int64_t number);  // "1,234,567"
std::string mebibytes(std::size_t bytes);  // "12.3"
std::string decimals(double number, int digits);

}  // namespace qe
