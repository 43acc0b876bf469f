/* Plays libvgpu-control.so as far as its files go: maps them at their paths in a container, below
 * argv[1], and checks what it sees. Offsets, locks and the seqlock are those of vgpu-manager §7.7.
 * Linked against nothing but libc.
 *
 *   config                            prints the fields of vgpu.config
 *   watch INDEX READS CHANGES         reads the limits of a card at least so often, until it has
 *                                     seen so many changes of them
 *   spill INDEX PID BYTES             books a row in the ledger of spilled memory
 *   sample INDEX USER SYS NPROC NS    publishes a sample of the use of compute
 *   refill INDEX                      checks a sample of the agent's, under its lock
 *
 * A line on stdout a fact; exit status 1 and a line on stderr where something is not as it must be.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { CARDS = 16, TRIES = 1024, MOST_READS = 2000000000 };

struct slot {
    _Atomic uint32_t seq;
    uint32_t pad;
    char uuid[48];
    uint64_t total, real;
    int32_t hard_core, soft_core, core_limit, hard_limit, memory_limit, oversold, activate;
    int32_t reserved[7];
};
struct config {
    uint32_t magic, version, size, slots;
    int32_t major, minor;
    char driver[32];
    char pad1[72];
    char pod_uid[48], pod[64], namespace[64], container[64], register_uuid[48];
    int32_t mode, watcher, vmem;
    char pad2[84];
    struct slot slot[CARDS];
};
struct vmem_slot {
    struct { int32_t pid; uint64_t bytes; } row[1024];
    uint32_t count;
    uint8_t lock[4];
};
struct vmem {
    uint32_t magic, version, size, slots;
    char pad[112];
    struct vmem_slot slot[CARDS];
};
struct sm_slot {
    int64_t tokens, total, refilled, share, published;
    int32_t up_limit, cycle, avg_free, previous, cooldown, exclusive, streak, lost, throttled;
    int32_t user, sys, nproc, ext, leader, interval;
    int32_t pad[7];
};
struct sm_node {
    uint32_t magic, version, size, slots;
    char pad[112];
    struct sm_slot slot[CARDS];
};
struct util_slot {
    struct { uint32_t pid; uint64_t at; uint32_t sm, mem, enc, dec; } sample[1024];
    uint32_t samples;
    uint64_t last_seen;
    struct { uint32_t pid; uint64_t used; uint32_t gi, ci; } compute[1024];
    uint32_t computes;
    struct { uint32_t pid; uint64_t used; uint32_t gi, ci; } graphics[1024];
    uint32_t graphicses;
    uint8_t lock[4];
};

_Static_assert(sizeof(struct slot) == 128, "slot");
_Static_assert(offsetof(struct config, pod_uid) == 128, "pod uid");
_Static_assert(offsetof(struct config, register_uuid) == 368, "register uuid");
_Static_assert(offsetof(struct config, mode) == 416, "mode");
_Static_assert(offsetof(struct config, slot) == 512 && sizeof(struct config) == 2560, "config");
_Static_assert(sizeof(struct vmem_slot) == 16392 && sizeof(struct vmem) == 262400, "vmem");
_Static_assert(sizeof(struct sm_slot) == 128 && sizeof(struct sm_node) == 2176, "sm_node");
_Static_assert(sizeof(struct util_slot) == 81952, "sm_util");

static const char *root;

static void fail(const char *format, ...) {
    va_list values;
    va_start(values, format);
    vfprintf(stderr, format, values);
    va_end(values);
    fputc('\n', stderr);
    exit(1);
}

static int opened(const char *path, int flags, off_t size) {
    char full[4096];
    snprintf(full, sizeof full, "%s%s", root, path);
    int file = open(full, flags | O_CLOEXEC, 0666);
    struct stat status;
    if (file < 0 || fstat(file, &status)) fail("%s: %s", full, strerror(errno));
    if (status.st_size != size) fail("%s has %jd bytes", full, (intmax_t)status.st_size);
    return file;
}

static void *mapped(int file, size_t size, int protection) {
    void *at = mmap(NULL, size, protection, MAP_SHARED, file, 0);
    if (at == MAP_FAILED) fail("mmap: %s", strerror(errno));
    return at;
}

static void lock(int file, off_t start, off_t length, short type) {
    struct flock range = {.l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = length};
    if (fcntl(file, F_OFD_SETLKW, &range)) fail("lock: %s", strerror(errno));
}

static struct config *config(void) {
    int file = opened("/etc/vgpu-manager/config/vgpu.config", O_RDONLY, 8192);
    struct config *all = mapped(file, sizeof *all, PROT_READ);
    if (all->magic != 0x56474346 || all->version != 1 || all->size != 2560 || all->slots != CARDS)
        fail("vgpu.config begins with %x %u %u %u", all->magic, all->version, all->size, all->slots);
    return all;
}

/* The library's way: what was read counts if the number was even, and the same before and after. */
static int limits(struct slot *slot, struct slot *copy) {
    for (int left = TRIES; left; left--) {
        uint32_t before = atomic_load_explicit(&slot->seq, memory_order_acquire);
        if (before & 1) continue;
        memcpy((char *)copy + 8, (const char *)slot + 8, sizeof *copy - 8);
        atomic_thread_fence(memory_order_acquire);
        if (atomic_load_explicit(&slot->seq, memory_order_relaxed) == before) return 1;
    }
    return 0;
}

static void print_config(void) {
    struct config *all = config();
    printf("cuda %d.%d driver %s\n", all->major, all->minor, all->driver);
    printf("pod %s %s/%s container %s register '%s'\n", all->pod_uid, all->namespace, all->pod,
           all->container, all->register_uuid);
    printf("mode %d watcher %d vmem %d\n", all->mode, all->watcher, all->vmem);
    for (int index = 0; index < CARDS; index++) {
        struct slot slot;
        if (!limits(&all->slot[index], &slot)) fail("slot %d is being written for ever", index);
        if (slot.activate)
            printf("card %d %s total %" PRIu64 " real %" PRIu64
                   " hard %d soft %d limits %d %d %d %d\n",
                   index, slot.uuid, slot.total, slot.real, slot.hard_core, slot.soft_core,
                   slot.core_limit, slot.hard_limit, slot.memory_limit, slot.oversold);
    }
}

/* Whoever changes the limits gives all of total, real and both cores the same number. */
static void watch(int index, long reads, long changes_wanted) {
    struct slot *slot = &config()->slot[index], copy;
    uint64_t last = 0;
    long changes = 0, torn = 0, missed = 0, done = 0;
    for (; (done < reads || changes < changes_wanted) && done < MOST_READS; done++) {
        if (!limits(slot, &copy)) { missed++; continue; }
        if (copy.total >> 20 != (uint64_t)copy.hard_core || copy.real != copy.total ||
            copy.soft_core != copy.hard_core || copy.activate != 1)
            torn++;
        changes += copy.total != last;
        last = copy.total;
    }
    printf("reads %ld torn %ld missed %ld changes %ld\n", done, torn, missed, changes);
}

static void spill(int index, int pid, uint64_t bytes) {
    int file = opened("/tmp/.vmem_node/vmem_node.config", O_RDWR | O_CREAT, 327680);
    struct vmem *all = mapped(file, sizeof *all, PROT_READ | PROT_WRITE);
    if (all->magic != 0x564D4E44 || all->version != 1 || all->size != sizeof *all ||
        all->slots != CARDS)
        fail("vmem_node.config begins with %x %u %u", all->magic, all->version, all->size);
    struct vmem_slot *slot = &all->slot[index];
    off_t at = (char *)slot->lock - (char *)all;
    lock(file, at, 1, F_WRLCK);
    slot->row[slot->count].pid = pid;
    slot->row[slot->count].bytes = bytes;
    slot->count++;
    lock(file, at, 1, F_UNLCK);
    printf("rows %u\n", slot->count);
}

static void sample(int index, int user, int sys, int nproc, int64_t at) {
    int guard = opened("/tmp/.sm_node/sm_node.lock", O_RDWR | O_CREAT, 0);
    int file = opened("/tmp/.sm_node/sm_node.config", O_RDWR | O_CREAT, 8192);
    struct sm_node *all = mapped(file, sizeof *all, PROT_READ | PROT_WRITE);
    if (all->magic != 0x534D4E44 || all->version != 3 || all->size != sizeof *all ||
        all->slots != CARDS)
        fail("sm_node.config begins with %x %u %u", all->magic, all->version, all->size);
    lock(guard, 0, 0, F_WRLCK);
    struct sm_slot *slot = &all->slot[index];
    slot->user = user;
    slot->sys = sys;
    slot->nproc = nproc;
    slot->up_limit = 40;
    slot->published = at;
    lock(guard, 0, 0, F_UNLCK);
    char path[64];
    snprintf(path, sizeof path, "/tmp/.vgpu_lock/vgpu_%d.lock", index);
    int card = opened(path, O_RDWR | O_CREAT, 0);
    lock(card, 0, 0, F_WRLCK);
    printf("published\n");
}

static void refill(int index) {
    int file = opened("/etc/vgpu-manager/watcher/sm_util.config", O_RDONLY, 1311232);
    struct util_slot *all = mapped(file, CARDS * sizeof *all, PROT_READ), *slot = &all[index];
    off_t at = (char *)slot->lock - (char *)all;
    lock(file, at, 1, F_RDLCK);
    printf("last seen %" PRIu64 "\n", slot->last_seen);
    for (uint32_t row = 0; row < slot->samples; row++)
        printf("sample %u at %" PRIu64 " sm %u mem %u enc %u dec %u\n", slot->sample[row].pid,
               slot->sample[row].at, slot->sample[row].sm, slot->sample[row].mem,
               slot->sample[row].enc, slot->sample[row].dec);
    for (uint32_t row = 0; row < slot->computes; row++)
        printf("compute %u uses %" PRIu64 "\n", slot->compute[row].pid, slot->compute[row].used);
    for (uint32_t row = 0; row < slot->graphicses; row++)
        printf("graphics %u uses %" PRIu64 "\n", slot->graphics[row].pid, slot->graphics[row].used);
    lock(file, at, 1, F_UNLCK);
}

int main(int count, char **words) {
    if (count < 3) fail("usage: client ROOT config|watch|spill|sample|refill ...");
    root = words[1];
    const char *what = words[2];
    long number[5] = {0};
    for (int place = 3; place < count && place < 8; place++)
        number[place - 3] = strtol(words[place], NULL, 10);
    if (!strcmp(what, "config")) print_config();
    else if (!strcmp(what, "watch")) watch(number[0], number[1], number[2]);
    else if (!strcmp(what, "spill")) spill(number[0], number[1], number[2]);
    else if (!strcmp(what, "sample"))
        sample(number[0], number[1], number[2], number[3], number[4]);
    else if (!strcmp(what, "refill")) refill(number[0]);
    else fail("no such check: %s", what);
    return 0;
}
