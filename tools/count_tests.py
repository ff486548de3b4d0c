#!/usr/bin/env python3
"""Counts the test cases of `bazel test` runs.

usage: count_tests.py EVENTS.json...    (files of bazel's --build_event_json_file, one for each run)

Counts test cases, not targets, from each test's XML. What Bazel was asked to run but has no good result counts as one
failure: a target that did not build, timed out, crashed outside any case or left no readable XML; likewise a run that
did not end well for another reason, or whose event file is missing or cut short. A passing test whose XML lists no
cases counts as one. Skipped and disabled cases count as nothing. Prints each failure and, last, "N passed, N failed".
Exits with 1 on any failure, or where nothing was counted.
"""

import json
import sys
import urllib.parse
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field

BAZEL_OK, BAZEL_TESTS_FAILED = 0, 3


@dataclass
class Count:
  passed: int = 0
  failures: list = field(default_factory=list)  # Descriptions.


def read_events(path):
  """The events of one run; raises OSError or ValueError if the file is missing, empty or cut short."""
  with open(path, encoding="utf-8") as file:
    events = [json.loads(line) for line in file if line.strip()]
  if not events or not events[-1].get("lastMessage"):
    raise ValueError("the event file is cut short")
  return events


def count_xml(path):
  """(passed, [failed case names]) of one test.xml; raises OSError or ElementTree.ParseError."""
  passed, failed = 0, []
  for case in ElementTree.parse(path).getroot().iter("testcase"):
    name = ".".join(filter(None, [case.get("classname"), case.get("name")]))
    if case.find("failure") is not None or case.find("error") is not None:
      failed.append(name)
    elif case.find("skipped") is not None or case.get("result") == "skipped" or case.get(
        "status") == "notrun":
      continue
    else:
      passed += 1
  return passed, failed


def count_result(label, result, count):
  """Adds one testResult event (one shard and run of a target)."""
  status = result.get("status", "NO_STATUS")
  xml = next((output["uri"] for output in result.get("testActionOutput", [])
              if output.get("name") == "test.xml" and output.get("uri", "").startswith("file:")), None)
  if xml is None:
    count.failures.append(f"{label}: {status}, no test.xml")
    return
  try:
    passed, failed = count_xml(urllib.parse.unquote(urllib.parse.urlparse(xml).path))
  except (OSError, ElementTree.ParseError) as error:
    count.failures.append(f"{label}: {status}, test.xml cannot be read: {error}")
    return
  count.failures += [f"{label}: {name}" for name in failed]
  if status == "PASSED" and passed == 0 and not failed:
    passed = 1
  elif status != "PASSED" and not failed:
    count.failures.append(f"{label}: {status}")
  count.passed += passed


def count_run(events):
  """Counts all test targets of one run."""
  count = Count()
  targets = set()  # Tests that were asked for.
  results = {}     # (label, run, shard) -> last attempt
  exit_code = None
  for event in events:
    ids = event.get("id", {})
    if "targetConfigured" in ids and event.get("configured", {}).get("targetKind", "").endswith(
        "_test rule"):
      targets.add(ids["targetConfigured"]["label"])
    elif "testResult" in ids and "testResult" in event:
      key = ids["testResult"]
      results[(key["label"], key.get("run", 1), key.get("shard", 1))] = event["testResult"]
    elif "buildFinished" in ids:
      exit_code = event.get("finished", {}).get("exitCode", {}).get("code", BAZEL_OK)
  for (label, _, _), result in sorted(results.items()):
    count_result(label, result, count)
  for label in sorted(targets - {label for label, _, _ in results}):
    count.failures.append(f"{label}: did not build, or did not run")
  if exit_code not in (BAZEL_OK, BAZEL_TESTS_FAILED) and not count.failures:
    count.failures.append(f"bazel ended with {exit_code}: something outside the tests did not build")
  return count


def main(paths):
  passed, failures = 0, []
  for path in paths:
    try:
      count = count_run(read_events(path))
    except (OSError, ValueError) as error:
      count = Count(failures=[f"{path}: {error}"])
    passed += count.passed
    failures += count.failures
  for failure in failures:
    print(f"FAILED {failure}")
  print(f"{passed} passed, {len(failures)} failed")
  return 1 if failures or passed == 0 else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
