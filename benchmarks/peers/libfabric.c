// libfabric's tcp provider: an RMA write that is complete when it is in the target's memory. Both ends poll.
//
// libfabric target|initiator NBYTES HOST
#include "lines.h"

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdatomic.h>
#include <sys/socket.h>

static void must(long status, const char* what) {
    if (status < 0) {
        fprintf(stderr, "%s: %s\n", what, fi_strerror((int)-status));
        exit(1);
    }
}

static struct fid_fabric* fabric;
static struct fid_domain* domain;
static struct fid_eq* events;
static struct fid_ep* endpoint;
static struct fid_cq* completions;

static struct fi_info* ask(const char* host, const char* port, uint64_t flags) {
    struct fi_info *hints = fi_allocinfo(), *found = NULL;
    hints->ep_attr->type = FI_EP_MSG;
    hints->caps = FI_MSG | FI_RMA;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_ALLOCATED | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY;
    hints->domain_attr->threading = FI_THREAD_SAFE;
    hints->fabric_attr->prov_name = strdup("tcp");
    must(fi_getinfo(FI_VERSION(1, 14), host, port, flags, hints, &found), "fi_getinfo: no tcp provider");
    fi_freeinfo(hints);
    return found;
}

static void open_endpoint(struct fi_info* info) {
    struct fi_cq_attr attributes = {.format = FI_CQ_FORMAT_CONTEXT, .wait_obj = FI_WAIT_NONE, .size = 64};
    must(fi_domain(fabric, info, &domain, NULL), "fi_domain");
    must(fi_cq_open(domain, &attributes, &completions, NULL), "fi_cq_open");
    must(fi_endpoint(domain, info, &endpoint, NULL), "fi_endpoint");
    must(fi_ep_bind(endpoint, &events->fid, 0), "bind eq");
    must(fi_ep_bind(endpoint, &completions->fid, FI_TRANSMIT | FI_RECV), "bind cq");
    must(fi_enable(endpoint), "fi_enable");
}

static void wait_event(uint32_t wanted, struct fi_eq_cm_entry* entry) {
    uint32_t event = 0;
    for (const double end = now() + 30; now() < end;) {
        const long n = fi_eq_read(events, &event, entry, sizeof *entry, 0);
        if (n == -FI_EAGAIN) continue;
        must(n, "fi_eq_read");
        if (event == wanted) return;
        break;
    }
    must(-FI_ETIMEDOUT, "connection management");
}

struct place {
    uint64_t address, key;
};

int main(int argc, char** argv) {
    if (argc != 4) return 2;
    const int target = !strcmp(argv[1], "target");
    const size_t nbytes = strtoul(argv[2], NULL, 10), room = nbytes + 64;
    struct fi_eq_attr event_attributes = {.wait_obj = FI_WAIT_UNSPEC};
    struct fi_eq_cm_entry entry;
    char line[LINE] = "-", theirs[LINE];
    leave_with_parent();

    char* memory = aligned_alloc(4096, (room + 4095) / 4096 * 4096);
    if (!memory) die("malloc");
    memset(memory, 0, room);
    struct fi_info* info;
    struct fid_pep* passive = NULL;
    if (target) {
        struct sockaddr_storage where;
        size_t length = sizeof where;
        info = ask(argv[3], "0", FI_SOURCE);
        must(fi_fabric(info->fabric_attr, &fabric, NULL), "fi_fabric");
        must(fi_eq_open(fabric, &event_attributes, &events, NULL), "fi_eq_open");
        must(fi_passive_ep(fabric, info, &passive, NULL), "fi_passive_ep");
        must(fi_pep_bind(passive, &events->fid, 0), "bind pep");
        must(fi_listen(passive), "fi_listen");
        must(fi_getname(&passive->fid, &where, &length), "fi_getname");
        const unsigned char* port = (unsigned char*)&where + 2;  // sin_port, and sin6_port too
        snprintf(line, sizeof line, "%d", port[0] * 256 + port[1]);
    }
    hello(line, theirs);
    theirs[strcspn(theirs, "\n")] = 0;
    if (target) {
        wait_event(FI_CONNREQ, &entry);
        info = entry.info;
        open_endpoint(info);
    } else {
        info = ask(argv[3], theirs, 0);
        must(fi_fabric(info->fabric_attr, &fabric, NULL), "fi_fabric");
        must(fi_eq_open(fabric, &event_attributes, &events, NULL), "fi_eq_open");
        open_endpoint(info);
    }
    struct fid_mr* registered;
    const uint64_t access = FI_WRITE | FI_REMOTE_WRITE | FI_SEND | FI_RECV;
    must(fi_mr_reg(domain, memory, room, access, 0, 7, 0, &registered, NULL), "fi_mr_reg");
    const int absolute = (info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0;
    struct place place = {absolute ? (uint64_t)memory : 0, fi_mr_key(registered)};
    struct fi_context2 context, receive_context;
    struct place received;
    struct fid_mr* received_mr;
    must(fi_mr_reg(domain, &received, sizeof received, access, 0, 8, 0, &received_mr, NULL), "fi_mr_reg");
    if (!target) must(fi_recv(endpoint, &received, sizeof received, fi_mr_desc(received_mr), 0, &receive_context), "fi_recv");
    must(target ? fi_accept(endpoint, NULL, 0) : fi_connect(endpoint, info->dest_addr, NULL, 0), "connect");
    wait_event(FI_CONNECTED, &entry);

    struct fi_cq_entry done;
    long n;
    if (target) {
        received = place;
        must(fi_send(endpoint, &received, sizeof received, fi_mr_desc(received_mr), 0, &context), "fi_send");
    }
    while ((n = fi_cq_read(completions, &done, 1)) == -FI_EAGAIN) {}
    must(n, "exchange of the memory's place");
    ready();

    _Atomic uint64_t* flag = (_Atomic uint64_t*)(memory + nbytes);
    void* descriptor = fi_mr_desc(registered);
    for (struct run run; next_run(&run);) {
        double start = now();
        if (target) {
            while (atomic_load(flag) != run.round + 1) {
                n = fi_cq_read(completions, &done, 1);  // progress is manual: it is made here
                if (n != -FI_EAGAIN) must(n, "fi_cq_read");
            }
            check(memory, nbytes, run.round);
            answer(0);
            continue;
        }
        fill(memory, nbytes, run.round);
        atomic_store(flag, run.round + 1);
        for (long i = 0; i <= run.warm + run.count; i++) {
            if (i == run.warm) start = now();
            const int last = i == run.warm + run.count;  // then the flag, which ends the target's round
            if (last) start = now() - start;
            struct iovec from = {last ? memory + nbytes : memory, last ? 8 : nbytes};
            struct fi_rma_iov to = {received.address + (last ? nbytes : 0), from.iov_len, received.key};
            const struct fi_msg_rma message = {&from, &descriptor, 1, 0, &to, 1, &context, 0};
            while ((n = fi_writemsg(endpoint, &message, FI_COMPLETION | FI_DELIVERY_COMPLETE)) == -FI_EAGAIN)
                fi_cq_read(completions, NULL, 0);
            must(n, "fi_writemsg");
            while ((n = fi_cq_read(completions, &done, 1)) == -FI_EAGAIN) {}
            must(n, "fi_cq_read");
        }
        answer(start);
    }
    return 0;
}
