/* Events of streams of tokens: the client gets them, a journal their text and token ids. */
#ifndef KVCONNECT_TOKEN_EVENTS_H
#define KVCONNECT_TOKEN_EVENTS_H

#include "native.h"

#include <stdbool.h>

/* The events of one stream that look like one of them, and the notes that were made of them. */
typedef struct TokenEvents TokenEvents;

/* `form` is Python's; see Relay.add in _native.pyi. NULL with an exception set. */
TokenEvents *new_token_events(PyObject *form);

void free_token_events(TokenEvents *events);

/* Notes the events that `content` consists of, and writes what the client gets of them to `out`,
 * which has room for twice the size; `made` gets its bytes. Returns false, and notes nothing, if
 * there is anything else, or no room for the notes. */
bool pass_token_events(TokenEvents *events, const char *content, size_t size, char *out,
                       size_t *made);

/* The notes, `size` bytes, which stay where they are. */
const char *token_notes(const TokenEvents *events, size_t *size);

#endif
