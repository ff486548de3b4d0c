// docs/rules.md says what each preset is and lists every option; this holds it to the tables.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>

#include "plan/rule.h"

namespace stiefel {
namespace {

std::string Page() {
  std::ifstream file("docs/rules.md");
  return std::string(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}

// "muon period=3": the options in which a spectral preset differs from muon.
std::string AsMuon(const Rule& preset) {
  Rule rule = *PresetRule("muon");
  std::string text = "muon";
  for (const auto& [key, value] : Options(preset)) {
    const auto before = Options(rule);
    EXPECT_TRUE(SetOption(rule, key, value).ok()) << key;
    if (Options(rule) != before) text += " " + key + "=" + value;
  }
  return text;
}

TEST(RulesDoc, HasASectionForEveryPresetThatSaysWhatItIs) {
  const std::string page = Page();
  ASSERT_FALSE(page.empty());
  for (const PresetInfo& info : Presets()) {
    const std::string name(info.name);
    const size_t begin = page.find("\n### " + name + "\n");
    ASSERT_NE(begin, std::string::npos) << name;
    EXPECT_NE(page.find("(#" + name + ")"), std::string::npos) << name << " is not in the contents";
    const std::string section = page.substr(begin, page.find("\n##", begin + 1) - begin);
    const Rule rule = *PresetRule(name);
    if (rule.family != RuleFamily::kSpectral) continue;
    EXPECT_NE(section.find("Same as: `" + AsMuon(rule) + "`"), std::string::npos)
        << name << ": " << AsMuon(rule);
  }
}

TEST(RulesDoc, ListsEveryOption) {
  const std::string page = Page();
  const size_t begin = page.find("\n## Options\n");
  ASSERT_NE(begin, std::string::npos);
  for (std::string_view key : OptionKeys()) {
    EXPECT_NE(page.find("`" + std::string(key) + "`", begin), std::string::npos) << key;
  }
}

}  // namespace
}  // namespace stiefel
