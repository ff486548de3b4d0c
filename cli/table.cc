#include "cli/table.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace stiefel {
namespace {

// Value in the largest unit that it reaches, each `base` times the one before.
std::string Scaled(double value, double base, const std::vector<const char*>& units) {
  size_t unit = 0;
  // 999.995 would be rounded to 1000.00.
  while (unit + 1 < units.size() && value >= base * 0.999995) {
    value /= base;
    ++unit;
  }
  return absl::StrFormat(unit == 0 ? "%.0f%s" : "%.2f%s", value, units[unit]);
}

}  // namespace

Table::Table(std::vector<std::string> header) { rows_.push_back(std::move(header)); }

void Table::AddRow(std::vector<std::string> cells) {
  assert(cells.size() == rows_[0].size());
  rows_.push_back(std::move(cells));
}

std::string Table::Text() const {
  std::vector<size_t> widths(rows_[0].size(), 0);
  for (const std::vector<std::string>& row : rows_) {
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string text;
  for (size_t r = 0; r < rows_.size(); ++r) {
    std::string line;
    for (size_t c = 0; c < widths.size(); ++c) {
      const std::string pad(widths[c] - rows_[r][c].size(), ' ');
      absl::StrAppend(&line, c == 0 ? "" : "  ", c == 0 ? rows_[r][c] : pad,
                      c == 0 ? pad : rows_[r][c]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&text, line, "\n");
    if (r == 0) {
      size_t width = 0;
      for (size_t c = 0; c < widths.size(); ++c) width += widths[c] + (c == 0 ? 0 : 2);
      absl::StrAppend(&text, std::string(width, '-'), "\n");
    }
  }
  return text;
}

std::string Bytes(double bytes) {
  return Scaled(bytes, 1024, {" B", " KiB", " MiB", " GiB", " TiB", " PiB", " EiB"});
}

std::string Count(int64_t count) {
  return Scaled(static_cast<double>(count), 1000, {"", " k", " M", " G", " T", " P", " E"});
}

std::string Duration(double seconds) {
  if (seconds <= 0) return "0 s";
  if (seconds < 999.5e-6) return absl::StrFormat("%.0f us", seconds * 1e6);
  if (seconds < 0.999995) return absl::StrFormat("%.2f ms", seconds * 1e3);
  return absl::StrFormat("%.2f s", seconds);
}

}  // namespace stiefel
