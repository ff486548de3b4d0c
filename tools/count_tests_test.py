#!/usr/bin/env python3
"""Tests of count_tests.py on event files as Bazel writes them."""

import contextlib
import io
import json
import os
import tempfile
import unittest

import count_tests

GTEST = """<testsuites><testsuite>
  <testcase name="A" status="run" result="completed" classname="S"/>
  <testcase name="B" status="run" result="completed" classname="S"/>
  <testcase name="D" status="notrun" result="suppressed" classname="S"/>
  <testcase name="K" status="run" result="skipped" classname="S"><skipped message="x"/></testcase>
  %s</testsuite></testsuites>"""
FAILED_CASE = '<testcase name="C" classname="S"><failure message="no"/></testcase>'


class CountTests(unittest.TestCase):

  def setUp(self):
    self.folder = tempfile.TemporaryDirectory()
    self.addCleanup(self.folder.cleanup)
    self.events = []

  def path(self, name):
    return os.path.join(self.folder.name, name)

  def target(self, label, kind="cc_test rule"):
    self.events.append({"id": {"targetConfigured": {"label": label}},
                        "configured": {"targetKind": kind}})

  def result(self, label, status, xml, attempt=1, shard=1):
    outputs = [{"name": "test.log", "uri": "file:///none"}]
    if xml is not None:
      name = "%s %d %d.xml" % (label.strip("/").replace(":", "_"), attempt, shard)
      with open(self.path(name), "w") as file:
        file.write(xml)
      outputs.append({"name": "test.xml", "uri": "file://" + self.path(name).replace(" ", "%20")})
    self.events.append({
        "id": {"testResult": {"label": label, "run": 1, "shard": shard, "attempt": attempt}},
        "testResult": {"status": status, "testActionOutput": outputs}})

  def finish(self, code=0, last=True, name="e.json"):
    self.events.append({"id": {"buildFinished": {}}, "finished": {"exitCode": {"code": code}}})
    self.events.append({"id": {"x": {}}, "lastMessage": last})
    with open(self.path(name), "w") as file:
      file.writelines(json.dumps(event) + "\n" for event in self.events)
    self.events = []
    return self.path(name)

  def count(self, *paths):
    """(exit status, last line, all lines)"""
    with contextlib.redirect_stdout(io.StringIO()) as out:
      status = count_tests.main(list(paths))
    lines = out.getvalue().splitlines()
    return status, lines[-1], lines

  def test_counts_cases_not_targets(self):
    self.target("//a:t")
    self.target("//a:lib", kind="cc_library rule")
    self.result("//a:t", "PASSED", GTEST % "")
    self.assertEqual(self.count(self.finish())[:2], (0, "2 passed, 0 failed"))

  def test_adds_up_runs_and_shards(self):
    self.result("//a:t", "PASSED", GTEST % "", shard=1)
    self.result("//a:t", "PASSED", GTEST % "", shard=2)
    first = self.finish(name="1.json")
    self.result("//a:t", "PASSED", GTEST % "")
    self.assertEqual(self.count(first, self.finish(name="2.json"))[:2], (0, "6 passed, 0 failed"))

  def test_failed_case_is_named(self):
    self.result("//a:t", "FAILED", GTEST % FAILED_CASE)
    status, last, lines = self.count(self.finish(code=3))
    self.assertEqual((status, last), (1, "2 passed, 1 failed"))
    self.assertIn("FAILED //a:t: S.C", lines)

  def test_last_attempt_counts(self):
    self.result("//a:t", "FAILED", GTEST % FAILED_CASE, attempt=1)
    self.result("//a:t", "PASSED", GTEST % "", attempt=2)
    self.assertEqual(self.count(self.finish())[:2], (0, "2 passed, 0 failed"))

  def test_no_cases_in_a_passing_script_is_one(self):
    self.result("//a:sh", "PASSED", "<testsuites><testsuite/></testsuites>")
    self.assertEqual(self.count(self.finish())[:2], (0, "1 passed, 0 failed"))

  def test_crash_after_good_cases_is_a_failure(self):
    self.result("//a:t", "FAILED", GTEST % "")
    self.result("//a:u", "TIMEOUT", "<testsuites><testsuite/></testsuites>")
    self.assertEqual(self.count(self.finish(code=3))[:2], (1, "2 passed, 2 failed"))

  def test_missing_or_broken_xml_is_a_failure(self):
    self.result("//a:t", "PASSED", None)
    self.result("//a:u", "PASSED", "<testsuites")
    self.assertEqual(self.count(self.finish())[:2], (1, "0 passed, 2 failed"))

  def test_target_that_did_not_build_is_a_failure(self):
    self.target("//a:t")
    self.result("//a:t", "PASSED", GTEST % "")
    self.target("//a:broken")
    status, last, lines = self.count(self.finish(code=1))
    self.assertEqual((status, last), (1, "2 passed, 1 failed"))
    self.assertTrue(any("//a:broken" in line for line in lines))

  def test_build_failure_outside_tests_is_a_failure(self):
    self.result("//a:t", "PASSED", GTEST % "")
    self.assertEqual(self.count(self.finish(code=1))[:2], (1, "2 passed, 1 failed"))

  def test_broken_event_files_are_failures(self):
    self.result("//a:t", "PASSED", GTEST % "")
    cut = self.finish(last=False)
    self.assertEqual(self.count(cut)[:2], (1, "0 passed, 1 failed"))
    self.assertEqual(self.count(self.path("none.json"))[:2], (1, "0 passed, 1 failed"))
    with open(self.path("half.json"), "w") as file:
      file.write('{"id": {')
    self.assertEqual(self.count(self.path("half.json"))[:2], (1, "0 passed, 1 failed"))

  def test_nothing_counted_is_not_success(self):
    self.assertEqual(self.count(self.finish())[:2], (1, "0 passed, 0 failed"))


if __name__ == "__main__":
  unittest.main()
