"""The wire, and the store in which workers meet."""

from mutants.mutant import Mutant

ROWS = [
    Mutant(
        "a frame may be of any length",
        "comm/frames.py",
        "if length < _REST or end > longest:",
        "if length < _REST:",
        "laws/test_store.py::test_any_head_is_bounded_before_it_is_read "
        "laws/test_store.py::test_garbage_is_closed_and_the_others_go_on",
    ),
    Mutant(
        "bytes behind the last field are passed over",
        "comm/frames.py",
        "    if at < len(body):\n        raise",
        "    if False:\n        raise",
        "laws/test_store.py::test_what_is_too_long_is_not_packed",
    ),
    Mutant(
        "a worker of another job is let in",
        "comm/credentials.py",
        'return "" if hmac.compare_digest(job.encode(), self.job.encode()) else other',
        'return ""',
        "laws/test_store.py::test_a_stranger_is_refused_by_name_and_said_once",
    ),
    Mutant(
        "a launcher that was asked for something else is let in",
        "comm/credentials.py",
        "if self.terms and terms != self.terms:",
        "if False:",
        "laws/test_store.py::test_a_launcher_that_was_asked_for_the_same_is_told_the_job "
        "laws/test_store.py::test_a_stranger_is_refused_by_name_and_said_once",
    ),
    Mutant(
        "who names no job is let in",
        "comm/credentials.py",
        'return "" if self.terms or not self.job else "it does not say which job it belongs to"',
        'return ""',
        "laws/test_store.py::test_who_names_no_job_is_refused_where_no_launcher_could_be_meant",
    ),
    Mutant(
        "a server without the secret is believed",
        "comm/credentials.py",
        'if not hmac.compare_digest(proof, self._proof(b"server", nonce, challenge, note)):',
        "if False:",
        "laws/test_store.py::test_a_server_that_does_not_know_the_secret_is_found_out",
    ),
    Mutant(
        "the group may read the secret",
        "comm/credentials.py",
        "found.st_mode & 0o077",
        "found.st_mode & 0o007",
        "laws/test_store.py::test_a_secret_that_others_can_read_is_refused",
    ),
    Mutant(
        "a will overwrites what was said",
        "comm/store_server.py",
        "if connection.will is not None and connection.will[0] not in self._data:",
        "if connection.will is not None:",
        "laws/test_store.py::test_a_will_is_done_when_a_process_ends_without_a_word",
    ),
    Mutant(
        "deleted keys take room for ever",
        "comm/store_server.py",
        "        self._bytes -= sum(len(key) + len(value) for key, value in gone)\n",
        "",
        "laws/test_store.py::test_memory_is_bounded",
    ),
    Mutant(
        "a key that is set again takes its room twice",
        "comm/store_server.py",
        "more = len(value) - len(self._data[key]) if key in self._data else len(value) + len(key)",
        "more = len(value) + len(key)",
        "laws/test_store.py::test_memory_is_bounded",
    ),
    Mutant(
        "strangers are without number",
        "comm/store_server.py",
        "if len(self._strangers) >= MOST_STRANGERS:",
        "if False:",
        "laws/test_store.py::test_a_flood_of_strangers_makes_room_and_slows_nobody",
    ),
    Mutant(
        "who says nothing stays",
        "comm/store_server.py",
        "        self._end_greetings()\n",
        "",
        "laws/test_store.py::test_who_greets_too_slowly_is_closed",
    ),
    Mutant(
        "a wait has no end",
        "comm/store_server.py",
        "        self._end_waits()\n",
        "",
        "laws/test_store.py::test_a_wait_ends_at_its_deadline",
    ),
    Mutant(
        "a connection may have any number of waits",
        "comm/store_server.py",
        "if len(connection.waits) >= _MOST_WAITS:",
        "if False:",
        "laws/test_store.py::test_memory_is_bounded laws/test_store.py::test_a_worker_that_asks_nonsense_harms_nobody",
    ),
    Mutant(
        "answers that are not read pile up",
        "comm/store_server.py",
        "if connection.unsent_bytes > _MOST_UNREAD:",
        "if False:",
        "laws/test_store.py::test_who_does_not_read_its_answers_is_closed",
    ),
    Mutant(
        "a key that is not set is nothing that was expected",
        "comm/store_server.py",
        "if held == expected or (held is None and not expected):",
        "if held == expected:",
        "laws/test_store.py::test_what_every_request_answers laws/test_store.py::test_torch_sees_a_store",
    ),
    Mutant(
        "a wait for several keys ends with the first",
        "comm/store_server.py",
        "        while wait.next < len(wait.keys) and wait.keys[wait.next] in self._data:\n"
        "            wait.next += 1\n"
        "        if wait.next < len(wait.keys):",
        "        if wait.keys[0] not in self._data:",
        "laws/test_store.py::test_waits_end_when_the_keys_are_set_and_hold_up_no_other_thread "
        "laws/test_store.py::test_a_wait_ends_at_its_deadline",
    ),
    Mutant(
        "a child of a process keeps its connection",
        "comm/store.py",
        '        self.lost = "this process was forked from the one that is connected"\n        self._sock.close()\n',
        '        self.lost = "this process was forked from the one that is connected"\n',
        "laws/test_store.py::test_a_fork_keeps_no_connection_open",
    ),
    Mutant(
        "who does not read its answers stops the store",
        "comm/store_server.py",
        "            sock.setblocking(False)  #",
        "            #",
        "laws/test_store.py::test_who_does_not_read_its_answers_is_closed",
    ),
]
