// Prepared views, and the arguments of the channels' fast paths: unusual arguments do not match.
#pragma once

#include "memory.h"

namespace tw {

struct View {
    nanobind::object region;
    std::shared_ptr<Span> span;
    u64 offset, nbytes;
};

struct RemoteView {
    nanobind::object region;
    u64 key, offset, nbytes;
    u64 path = 0;  // the path that this was resolved for; 0: none
    std::weak_ptr<Span> span;
    bool writable = false;
};

inline bool is_word(const RemoteView& view) { return view.nbytes == 8 && view.offset % 8 == 0; }

// The word of a pair (remote view, value), or null.
inline const RemoteView* take_signal(nanobind::handle signal, nanobind::handle& value) {
    if (!PyTuple_CheckExact(signal.ptr()) || PyTuple_GET_SIZE(signal.ptr()) != 2) return nullptr;
    const nanobind::handle view = PyTuple_GET_ITEM(signal.ptr(), 0);
    value = PyTuple_GET_ITEM(signal.ptr(), 1);
    return nanobind::isinstance<RemoteView>(view) ? nanobind::inst_ptr<RemoteView>(view) : nullptr;
}

inline bool take_value(nanobind::handle value, u64& out) {
    if (!PyLong_CheckExact(value.ptr())) return false;
    out = PyLong_AsUnsignedLongLong(value.ptr());
    if (out != ~u64{0} || !PyErr_Occurred()) return true;
    PyErr_Clear();  // negative, or too large
    return false;
}

}  // namespace tw
