/* An event is not parsed as JSON. It has the form of an earlier one, which Python has read: the
 * same bytes, but for one string, its text, and one list of numbers, its token ids.
 */
#include "token_events.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_DIGITS = 9 }; /* of a token id, which fits into 32 bits then */

static const char NOTHING[] = "null"; /* instead of token ids that the client did not ask for */

struct TokenEvents {
    size_t head, middle, tail; /* bytes of `form` before the text, the ids, and after them */
    bool shows_ids;
    size_t noted, room; /* bytes of `notes` */
    char *notes;
    char form[];
};

TokenEvents *new_token_events(PyObject *form) {
    const char *head, *middle, *tail;
    Py_ssize_t head_size, middle_size, tail_size, room;
    int shows_ids;
    if (!PyTuple_Check(form))
        return (void)PyErr_Format(PyExc_TypeError, "the form of events is no tuple"), NULL;
    if (!PyArg_ParseTuple(form, "y#y#y#np", &head, &head_size, &middle, &middle_size, &tail,
                          &tail_size, &room, &shows_ids))
        return NULL;
    if (room < 0)
        return (void)PyErr_Format(PyExc_ValueError, "room is %zd, not 0 or more", room), NULL;
    const size_t size = (size_t)head_size + (size_t)middle_size + (size_t)tail_size;
    TokenEvents *events = malloc(sizeof *events + size + (size_t)room);
    if (events == NULL)
        return (void)PyErr_NoMemory(), NULL;
    *events = (TokenEvents){.head = (size_t)head_size,
                            .middle = (size_t)middle_size,
                            .tail = (size_t)tail_size,
                            .shows_ids = shows_ids,
                            .room = (size_t)room,
                            .notes = events->form + size};
    memcpy(events->form, head, events->head);
    memcpy(events->form + events->head, middle, events->middle);
    memcpy(events->form + events->head + events->middle, tail, events->tail);
    return events;
}

void free_token_events(TokenEvents *events) {
    free(events);
}

const char *token_notes(const TokenEvents *events, size_t *size) {
    *size = events->noted;
    return events->notes;
}

typedef struct {
    const char *at, *end;
} Reader;

/* These return whether it is there, and go on after it. */

static bool skip(Reader *reader, const char *bytes, size_t size) {
    if ((size_t)(reader->end - reader->at) < size || memcmp(reader->at, bytes, size) != 0)
        return false;
    reader->at += size;
    return true;
}

static bool skip_string(Reader *reader) {
    const char *at = reader->at;
    if (at == reader->end || *at != '"')
        return false;
    for (at++; at < reader->end && (unsigned char)*at >= ' '; at++) {
        if (*at == '"') {
            reader->at = at + 1;
            return true;
        }
        if (*at == '\\' && (++at == reader->end || (unsigned char)*at < ' '))
            return false;
    }
    return false;
}

static bool skip_numbers(Reader *reader) {
    const char *at = reader->at;
    if (at == reader->end || *at != '[')
        return false;
    do {
        const char *digits = ++at;
        while (at < reader->end && *at >= '0' && *at <= '9')
            at++;
        if (at == digits || at - digits > MOST_DIGITS)
            return false;
    } while (at < reader->end && *at == ',');
    if (at == reader->end || *at != ']')
        return false;
    reader->at = at + 1;
    return true;
}

static char *append(char *out, const char *bytes, size_t size) {
    memcpy(out, bytes, size);
    return out + size;
}

/* Notes "[[ids],text]," with both as they are in the event. */
static bool note(TokenEvents *events, const char *ids, size_t ids_size, const char *text,
                 size_t text_size) {
    const size_t size = ids_size + text_size + 4;
    if (events->room - events->noted < size)
        return false;
    char *out = append(events->notes + events->noted, "[", 1);
    out = append(out, ids, ids_size);
    out = append(out, ",", 1);
    out = append(out, text, text_size);
    append(out, "],", 2);
    events->noted += size;
    return true;
}

/* Passes one event, and moves `out` after it. */
static bool pass_event(TokenEvents *events, Reader *reader, char **out) {
    const char *form = events->form, *begin = reader->at;
    if (!skip(reader, form, events->head))
        return false;
    const char *text = reader->at;
    if (!skip_string(reader))
        return false;
    const size_t text_size = (size_t)(reader->at - text);
    if (!skip(reader, form + events->head, events->middle))
        return false;
    const char *ids = reader->at;
    if (!skip_numbers(reader))
        return false;
    const char *rest = reader->at;
    if (!skip(reader, form + events->head + events->middle, events->tail) ||
        !note(events, ids, (size_t)(rest - ids), text, text_size))
        return false;
    if (events->shows_ids) {
        *out = append(*out, begin, (size_t)(reader->at - begin));
        return true;
    }
    *out = append(*out, begin, (size_t)(ids - begin));
    *out = append(*out, NOTHING, sizeof NOTHING - 1);
    *out = append(*out, rest, (size_t)(reader->at - rest));
    return true;
}

bool pass_token_events(TokenEvents *events, const char *content, size_t size, char *out,
                       size_t *made) {
    Reader reader = {content, content + size};
    const size_t noted = events->noted;
    char *end = out;
    while (reader.at < reader.end) {
        if (!pass_event(events, &reader, &end)) {
            events->noted = noted;
            return false;
        }
    }
    *made = (size_t)(end - out);
    return true;
}
