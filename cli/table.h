#ifndef STIEFEL_CLI_TABLE_H_
#define STIEFEL_CLI_TABLE_H_

#include <cstdint>
#include <string>
#include <vector>

namespace stiefel {

// A table of text: the first column flush left, the others flush right, two spaces between.
class Table {
 public:
  explicit Table(std::vector<std::string> header);

  // REQUIRES: as many cells as the header has.
  void AddRow(std::vector<std::string> cells);

  // Header, a rule, and the rows; each line ends with a newline.
  std::string Text() const;

 private:
  std::vector<std::vector<std::string>> rows_;  // The header is the first.
};

// "512 B", "3.25 KiB", ... "1.50 TiB".
std::string Bytes(double bytes);

// "17", "124.44 M", "8.03 G".
std::string Count(int64_t count);

// "0 s", "812 us", "3.25 ms", "1.50 s".
std::string Duration(double seconds);

}  // namespace stiefel

#endif  // STIEFEL_CLI_TABLE_H_
