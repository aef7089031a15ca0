// A file of memory, mapped where its pages can be huge ones: an entry of the page tables for 2 MiB. A file of 512 MiB in
// pages of 4 KiB takes 40 ms to map and touch, which is more than a copy of it does; in huge ones it takes less than 1 ms.
#include "file_map.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "unlocked.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tw {
namespace {

constexpr size_t huge_bytes = size_t{2} << 20;
constexpr int collapse = 25;  // MADV_COLLAPSE, of Linux 6.1

class FileMap {
  public:
    // A private map is writable, and changes stay in this process.
    FileMap(int fd, size_t nbytes, bool shared) : nbytes_(std::max<size_t>(nbytes, 1)), held_(nbytes_ + huge_bytes) {
        held_at_ = mmap(nullptr, held_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (held_at_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
        const auto at = reinterpret_cast<uintptr_t>(held_at_);
        void* aligned = reinterpret_cast<void*>((at + huge_bytes - 1) / huge_bytes * huge_bytes);
        data_ = mmap(aligned, nbytes_, PROT_READ | PROT_WRITE, (shared ? MAP_SHARED : MAP_PRIVATE) | MAP_FIXED, fd, 0);
        if (data_ != MAP_FAILED) return;
        const int error = errno;
        munmap(held_at_, held_);
        throw std::system_error(error, std::generic_category(), "mmap");
    }
    FileMap(const FileMap&) = delete;
    FileMap& operator=(const FileMap&) = delete;
    ~FileMap() { munmap(held_at_, held_); }

    bool make_huge() const {
        const size_t whole = nbytes_ / huge_bytes * huge_bytes;
        return whole && madvise(data_, whole, collapse) == 0;
    }

    static int get_buffer(PyObject* self, Py_buffer* view, int flags) {
        const FileMap& m = *nb::inst_ptr<FileMap>(nb::handle(self));
        return PyBuffer_FillInfo(view, self, m.data_, static_cast<Py_ssize_t>(m.nbytes_), 0, flags);
    }

  private:
    const size_t nbytes_, held_;
    void *held_at_, *data_;
};

PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(FileMap::get_buffer)}, {0, nullptr}};

}  // namespace

void bind_file_maps(nb::module_& m) {
    nb::class_<FileMap>(m, "FileMap", "A file of memory, mapped as long as anybody has a view of it.", nb::type_slots(slots))
        .def(nb::init<int, size_t, bool>(), "fd"_a, "nbytes"_a, "shared"_a,
             "The file has so many bytes, or whoever touches those beyond them dies. Not shared: changes are this map's own.")
        .def("make_huge", &FileMap::make_huge, nb::call_guard<Unlocked>(),
             "Moves the file's pages into huge ones; whether all of them are. It has to be writable, and its pages there.");
}

}  // namespace tw
