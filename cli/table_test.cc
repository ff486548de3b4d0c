#include "cli/table.h"

#include <gtest/gtest.h>

namespace stiefel {
namespace {

TEST(Table, AlignsItsColumns) {
  Table table({"name", "n"});
  table.AddRow({"a", "100"});
  table.AddRow({"longer", "2"});
  EXPECT_EQ(table.Text(),
            "name      n\n"
            "-----------\n"
            "a       100\n"
            "longer    2\n");
}

TEST(Format, PicksTheUnit) {
  EXPECT_EQ(Bytes(0), "0 B");
  EXPECT_EQ(Bytes(512), "512 B");
  EXPECT_EQ(Bytes(3328), "3.25 KiB");
  EXPECT_EQ(Bytes(1024.0 * 1024 - 1), "1.00 MiB");
  EXPECT_EQ(Count(17), "17");
  EXPECT_EQ(Count(124439808), "124.44 M");
  EXPECT_EQ(Duration(0), "0 s");
  EXPECT_EQ(Duration(0.000812), "812 us");
  EXPECT_EQ(Duration(0.00325), "3.25 ms");
  EXPECT_EQ(Duration(0.999999), "1.00 s");
  EXPECT_EQ(Duration(90), "90.00 s");
}

}  // namespace
}  // namespace stiefel
