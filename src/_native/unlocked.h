// The GIL, given up while native code works or waits.
//
// A daemon thread that asks for the GIL back while the interpreter ends would be unwound through C++ frames, which
// aborts the process. Such a thread sleeps here forever instead, while the process ends.
#pragma once

#include <Python.h>

namespace tw {

class Unlocked {
  public:
    Unlocked() : state_(PyEval_SaveThread()) {}
    ~Unlocked();
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

    // By the thread that ends the interpreter, with the GIL: from here on no other thread comes back.
    static void end_of_interpreter();
    static void after_fork_in_child();

  private:
    PyThreadState* state_;
};

}  // namespace tw
