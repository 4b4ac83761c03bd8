"Task, network, blocks and a fastai Learner together, as a user would write it"
import torch
from fastai.learner import Learner
from fastai.metrics import accuracy

from reinit_nb.blocks import blocks
from reinit_nb.core import Streams
from reinit_nb.models import model
from reinit_nb.vision import Task, image_dls


def test_train_forget_the_upper_blocks_and_train_on():
    net = model('scnn', c_in=1, size=16, n_out=10, width=.25)
    parts = blocks(net, x=(2, 1, 16, 16))
    assert len(parts) == 4
    learn = Learner(image_dls(Task('digits', size=16, channels=1), seed=0, bs=64, device='cpu'), net, metrics=accuracy)
    with learn.no_logging(): learn.fit(3, .003)
    assert learn.validate()[1] > .9
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    parts.reset_above(2, streams=Streams(0))
    now = dict(net.named_parameters())
    assert all(torch.equal(now[n], before[n]) for n in parts.upto(2))
    assert all(not torch.equal(now[n], before[n]) for n in parts.above(2) if before[n].ndim > 1)
    assert learn.validate()[1] < .5
    with learn.no_logging(): learn.fit(2, .003)
    assert learn.validate()[1] > .9
