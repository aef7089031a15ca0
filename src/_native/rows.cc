// Rows of a table, which lie anywhere in memory, so that the time goes into fetching them: each is fetched once, where
// numpy adds to a row it has read and written before, and while others are worked on.
#include "rows.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "unlocked.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tw {
namespace {

constexpr size_t ahead = 16;  // rows
constexpr size_t line = 64;
constexpr size_t fetched = 8 * line;  // of a row; what follows comes by the processor's own prefetching

class Buffer {
public:
    Buffer(const nb::object& owner, int flags) {
        if (PyObject_GetBuffer(owner.ptr(), &view_, flags | PyBUF_C_CONTIGUOUS) != 0) throw nb::python_error();
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { PyBuffer_Release(&view_); }
    char* data() const { return static_cast<char*>(view_.buf); }
    size_t nbytes() const { return static_cast<size_t>(view_.len); }

private:
    Py_buffer view_;
};

// Numbers of rows, which all are in the table. A copy: who wrote them may write again meanwhile.
std::vector<uint32_t> checked(const Buffer& indices, size_t row, const Buffer& table, const Buffer& beside) {
    std::vector<uint32_t> numbers(indices.nbytes() / 4);
    if (indices.nbytes() % 4 || beside.nbytes() != numbers.size() * row) throw nb::value_error("the rows are not as many as their numbers");
    if (numbers.empty()) return numbers;
    memcpy(numbers.data(), indices.data(), indices.nbytes());
    if (!row || *std::max_element(numbers.begin(), numbers.end()) >= table.nbytes() / row) throw nb::index_error("there is no row of that number");
    return numbers;
}

// Calls `work(row of the table, where that row is among those side by side)`.
template <int write, typename Work>
void each(char* table, const std::vector<uint32_t>& numbers, size_t row, Work work) {
    const size_t part = std::min(row, fetched);
    for (size_t i = 0; i < numbers.size(); ++i) {
        if (i + ahead < numbers.size()) {
            const char* next = table + numbers[i + ahead] * row;
            for (size_t at = 0; at < part; at += line) __builtin_prefetch(next + at, write);
        }
        work(table + numbers[i] * row, i * row);
    }
}

void take_rows(const nb::object& target, const nb::object& table, const nb::object& indices, size_t row) {
    const Buffer to(target, PyBUF_WRITABLE), from(table, 0), given(indices, 0);
    const auto numbers = checked(given, row, from, to);
    Unlocked unlocked;
    each<0>(from.data(), numbers, row, [&](const char* here, size_t at) { memcpy(to.data() + at, here, row); });
}

template <typename Number>
void add(char* table, const std::vector<uint32_t>& numbers, const char* rows, size_t row) {
    each<1>(table, numbers, row, [&](char* here, size_t at) {
        auto* to = reinterpret_cast<Number*>(here);
        const auto* from = reinterpret_cast<const Number*>(rows + at);
        for (size_t k = 0; k < row / sizeof(Number); ++k) to[k] += from[k];
    });
}

void add_rows(const nb::object& table, const nb::object& indices, const nb::object& rows, size_t row, bool wide) {
    const Buffer to(table, PyBUF_WRITABLE), from(rows, 0), given(indices, 0);
    const auto numbers = checked(given, row, to, from);
    const auto misfit = reinterpret_cast<uintptr_t>(to.data()) | reinterpret_cast<uintptr_t>(from.data()) | row;
    if (misfit % (wide ? 8 : 4)) throw nb::value_error("rows of floating-point numbers are aligned as these are");
    Unlocked unlocked;
    (wide ? add<double> : add<float>)(to.data(), numbers, from.data(), row);
}

}  // namespace

void bind_rows(nb::module_& m) {
    m.def("take_rows", &take_rows, "target"_a, "table"_a, "indices"_a, "row"_a,
          "Copies rows of `row` bytes out of a table: those with these unsigned numbers of 32 bits. Raises `IndexError`.");
    m.def("add_rows", &add_rows, "table"_a, "indices"_a, "rows"_a, "row"_a, "wide"_a,
          "Adds rows, of float32 or `wide` of float64, to those with these numbers. Raises `IndexError`, before any change.");
}

}  // namespace tw
