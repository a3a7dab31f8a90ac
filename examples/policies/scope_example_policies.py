"""A policy that holds a score at a target: an integral controller for the scale of an edit."""

from vllm_scope.control import Decision


class Hold:
    """Each process makes one Hold, with the operator's options."""

    def __init__(self, most=4.0):
        self.most = most  # no request gets a larger scale

    def check(self, options):
        """If this method raises an error, the request is refused with the error's text."""
        wanted = {"score", "edit", "target", "gain"}
        if set(options) != wanted:
            raise ValueError(f"the options are {', '.join(sorted(wanted))}.")

    def start(self, request):
        """The running policy of one request (vllm_scope.control.Start)."""
        return Holding(self.most, **request.options)


class Holding:
    def __init__(self, most, score, edit, target, gain):
        self.most, self.score, self.edit = most, score, edit
        self.target, self.gain, self.scale = target, gain, 0.0

    def observe(self, position, scores):
        """A worker calls this one time for each position that has scores, in order."""
        if self.score not in scores:
            return None
        error = self.target - scores[self.score]
        wanted = self.scale + self.gain * error
        self.scale = min(max(wanted, -self.most), self.most)
        flag = "at its limit" if self.scale != wanted else None
        return Decision(scale={self.edit: self.scale}, flag=flag)
