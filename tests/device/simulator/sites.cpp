// Sites: where the Python program is, as the innermost frame outside of torch and other packages, for reports that a
// reader can act on.
#include <Python.h>

#include <unordered_map>

#include "simulator.h"

namespace sim {

WithoutGil::WithoutGil() : thread(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
WithoutGil::~WithoutGil() { if (thread) PyEval_RestoreThread(static_cast<PyThreadState*>(thread)); }

static const std::string* file_of(PyCodeObject* code) {  // null for packages', Python's own and the simulator's
  static std::unordered_map<PyCodeObject*, std::string> files;
  auto [found, is_new] = files.try_emplace(code);
  if (is_new) {
    Py_INCREF(code);  // so that its address names no other one
    const char* name = PyUnicode_AsUTF8(code->co_filename);
    const std::string file = name ? name : "<unknown>";
    for (const char* part : {"/site-packages/", "/lib/python", "/device/simulator/", "<"})
      if (file.find(part) != std::string::npos) return nullptr;
    found->second = file;
  }
  return found->second.empty() ? nullptr : &found->second;
}

Site here() {
  if (!Py_IsInitialized()) return {};
  const PyGILState_STATE held = PyGILState_Ensure();
  Site site;
  for (PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get()); frame;) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if ((site.file = file_of(code))) site.line = PyFrame_GetLineNumber(frame);
    Py_DECREF(code);
    PyFrameObject* outer = site.file ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  PyGILState_Release(held);
  return site;
}

std::string text(const Site& site) {
  return site.file ? *site.file + ":" + std::to_string(site.line) : "a thread of torch";
}

}  // namespace sim
