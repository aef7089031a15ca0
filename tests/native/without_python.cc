// What the native core asks of Python, where there is none: nobody holds the GIL, and no buffer comes from there.
#include <Python.h>

extern "C" {
PyThreadState* PyEval_SaveThread() { return nullptr; }
void PyEval_RestoreThread(PyThreadState*) {}
int Py_IsInitialized() { return 0; }
int PyGILState_Check() { return 0; }
int PyObject_GetBuffer(PyObject*, Py_buffer*, int) { return -1; }
void PyBuffer_Release(Py_buffer*) {}
void PyErr_Clear() {}
int Py_AddPendingCall(int (*)(void*), void*) { return 0; }
}
