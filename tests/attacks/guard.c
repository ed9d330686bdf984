/* Memory of tensors between guard pages: what reads or writes outside of it ends the process.

   Loaded before libc (LD_PRELOAD). PyTorch takes all memory for CPU tensors from posix_memalign. Each block ends, but for
   its alignment, where an inaccessible page begins; what alignment leaves over is filled with a pattern and looked at when
   the block is freed, and no address is used twice while there are new ones. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define ARENA (1ul << 42)
#define PAGE 4096ul
#define GAP (16 * PAGE)
#define PATTERN 0xA5

struct block { uint64_t bytes, pages; };   /* in a page of its own, in front of the gap in front of the block */

static char *arena, *next;
static void (*free_of_libc)(void *);

static void start(void) {
  free_of_libc = (void (*)(void *))dlsym(RTLD_NEXT, "free");
  arena = mmap(0, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (arena == MAP_FAILED) _exit(97);
  next = arena;
}

int posix_memalign(void **found, size_t alignment, size_t bytes) {
  if (!arena) start();
  uint64_t pages = (bytes + PAGE - 1) / PAGE, whole = PAGE + GAP + pages * PAGE + GAP;
  if (bytes > (1ul << 26) || alignment > PAGE) return ENOMEM;
  char *head = __atomic_fetch_add(&next, whole, __ATOMIC_RELAXED);
  if (head + whole > arena + ARENA) _exit(98);
  if (mprotect(head, PAGE, PROT_READ | PROT_WRITE)) return ENOMEM;
  struct block *block = (struct block *)head;
  block->bytes = bytes;
  block->pages = pages;
  char *first = head + PAGE + GAP;
  if (pages && mprotect(first, pages * PAGE, PROT_READ | PROT_WRITE)) return ENOMEM;
  uint64_t slack = pages * PAGE - bytes;
  slack -= slack % 16;   /* PyTorch asks for 64, and its kernels do with 16 */
  memset(first, PATTERN, pages * PAGE);
  *found = first + slack;
  return 0;
}

void free(void *memory) {
  if (!free_of_libc) start();
  char *at = memory;
  if (at < arena || at >= arena + ARENA) {
    free_of_libc(memory);
    return;
  }
  char *page = (char *)((uintptr_t)at & ~(PAGE - 1)), *head = page - GAP - PAGE;
  struct block *block = (struct block *)head;
  char *end = page + block->pages * PAGE;
  for (char *one = page; one < at; one++) if ((unsigned char)*one != PATTERN) abort();
  for (char *one = at + block->bytes; one < end; one++) if ((unsigned char)*one != PATTERN) abort();
  mmap(head, PAGE + GAP + block->pages * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}
