// The short way of an operation on mapped memory: prepared views, a few checks, a copy and a store.
//
// A remote view remembers where its region lies for one path (one channel). Whatever is unusual, from a first use to a
// closed region, is left to the caller: nothing has happened then.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include "count.h"
#include "views.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tw {
namespace {

u64 next_path = 1;  // with the GIL

// `channel` is kept weakly: it owns this path, and what a channel holds is to be free as soon as it is dropped.
class Path {
  public:
    Path(std::shared_ptr<Liveness> liveness, std::shared_ptr<Liveness> device, nb::handle channel, nb::object done)
        : liveness_(std::move(liveness)), device_(std::move(device)), channel_(nb::steal(PyWeakref_NewRef(channel.ptr(), nullptr))), done_(std::move(done)), id_(next_path++) {
        if (!channel_) throw nb::python_error();
    }

    void remember(RemoteView& view, const Memory& memory, bool writable) const {
        view.span = memory.span;
        view.writable = writable;
        view.path = id_;
    }

    nb::object write_or_else(nb::handle source, nb::handle target, nb::handle signal, nb::handle fence) const {
        if (nb::isinstance<View>(source) && nb::isinstance<RemoteView>(target) &&
            write(*nb::inst_ptr<View>(source), *nb::inst_ptr<RemoteView>(target), signal))
            return done_;
        return channel().attr("_write")(source, target, signal);
    }

    nb::object signal_or_else(nb::handle target, nb::handle value, nb::handle fence) const {
        if (nb::isinstance<RemoteView>(target) && signal(*nb::inst_ptr<RemoteView>(target), value)) return done_;
        return channel().attr("_signal")(target, value);
    }

  private:
    bool write(const View& source, const RemoteView& target, nb::handle signal) const {
        const auto to = find(target, true);
        if (!to || source.nbytes != target.nbytes || source.span->closed()) return false;
        Flag flag;
        if (!signal.is_none() && !take(signal, flag)) return false;
        count_move(source.nbytes);
        move(to->base + target.offset, source.span->base + source.offset, source.nbytes);
        if (flag.span) raise(*flag.span, flag.offset, flag.value);
        return true;
    }

    bool signal(const RemoteView& target, nb::handle value) const {
        Flag flag;
        if (!take(target, value, flag)) return false;
        count_locked(Counter::messages);
        raise(*flag.span, flag.offset, flag.value);
        return true;
    }

  public:
    bool read(const View& target, const RemoteView& source) const {
        const auto from = find(source, false);
        if (!from || source.nbytes != target.nbytes || target.span->closed() || !target.span->writable) return false;
        count_move(source.nbytes);
        move(target.span->base + target.offset, from->base + source.offset, source.nbytes);
        return true;
    }

  private:
    struct Flag {
        std::shared_ptr<Span> span;
        u64 offset = 0, value = 0;
    };

    static void count_move(u64 nbytes) {
        count_locked(Counter::messages);
        count_locked(Counter::bytes, nbytes);
        count_locked(Counter::copies);
        count_locked(Counter::copied_bytes, nbytes);
    }

    nb::object channel() const {
        nb::object found = channel_();
        if (found.is_none()) throw nb::value_error("the channel is gone");
        return found;
    }

    std::shared_ptr<Span> find(const RemoteView& view, bool write) const {
        if (view.path != id_ || liveness_->lost() || device_->lost() || (write && !view.writable)) return nullptr;
        auto span = view.span.lock();
        return span && !span->closed() ? span : nullptr;
    }

    bool take(nb::handle signal, Flag& flag) const {
        nb::handle value;
        const RemoteView* target = take_signal(signal, value);
        return target && take(*target, value, flag);
    }

    bool take(const RemoteView& target, nb::handle value, Flag& flag) const {
        if (!is_word(target) || !take_value(value, flag.value)) return false;
        flag.offset = target.offset;
        flag.span = find(target, true);
        return flag.span && flag.span->aligned(target.offset);
    }

    const std::shared_ptr<Liveness> liveness_, device_;
    const nb::object channel_, done_;
    const u64 id_;
};

}  // namespace

void bind_mapped(nb::module_& m) {
    nb::class_<View>(m, "View", "A part of a region: what a write sends and a read fills. Prepare it once, use it every step.")
        .def("__init__", [](View* self, nb::object region, u64 offset, u64 nbytes) {
                 auto span = nb::cast<const Memory&>(region).span;
                 new (self) View{std::move(region), std::move(span), offset, nbytes};
             }, "region"_a, "offset"_a, "nbytes"_a)
        .def_prop_ro("region", [](const View& v) { return v.region; }, nb::sig("def region(self) -> Region"))
        .def_prop_ro("buffer", [](const View& v) {
                 const nb::object whole = nb::steal(PyMemoryView_FromObject(v.region.ptr()));
                 return nb::object(whole[nb::slice(nb::int_(v.offset), nb::int_(v.offset + v.nbytes), nb::none())]);
             }, nb::sig("def buffer(self) -> memoryview"), "The bytes themselves.")
        .def_ro("offset", &View::offset)
        .def_ro("nbytes", &View::nbytes);

    nb::class_<RemoteView>(m, "RemoteView", "A part of a peer's region: where a write lands and a read comes from.")
        .def("__init__", [](RemoteView* self, nb::object region, u64 offset, u64 nbytes) {
                 const u64 key = nb::cast<u64>(region.attr("key"));
                 new (self) RemoteView{std::move(region), key, offset, nbytes};
             },
             "region"_a, "offset"_a, "nbytes"_a)
        .def_prop_ro("region", [](const RemoteView& v) { return v.region; }, nb::sig("def region(self) -> RemoteRegion"))
        .def_ro("offset", &RemoteView::offset)
        .def_ro("nbytes", &RemoteView::nbytes);

    nb::class_<Path>(m, "Path", "The short way of a channel over mapped memory. What is unusual goes to the channel's own `_write` and `_signal`.")
        .def("__init__", [](Path* self, std::shared_ptr<Liveness> liveness, std::shared_ptr<Liveness> device, nb::handle channel, nb::object done) {
                 new (self) Path(std::move(liveness), std::move(device), channel, std::move(done));
             }, "liveness"_a, "device"_a, "channel"_a, "done"_a)
        .def("remember", &Path::remember, "view"_a, "memory"_a, "writable"_a, "Where the region of a view lies, in this channel.")
        .def("write", &Path::write_or_else, "local"_a.none(), "remote"_a.none(), "signal"_a.none() = nb::none(), nb::kw_only(), "fence"_a = false,
             nb::sig("def write(self, local: View, remote: RemoteView, signal: tuple[RemoteView, int] | None = None, *, fence: bool = False) -> Completion"))
        .def("signal", &Path::signal_or_else, "target"_a.none(), "value"_a.none(), nb::kw_only(), "fence"_a = false,
             nb::sig("def signal(self, target: RemoteView, value: int, *, fence: bool = False) -> Completion"))
        .def("read", &Path::read, "target"_a, "source"_a, "False: nothing was done, take the long way.");
}

}  // namespace tw
