"""# A table, and a page that explains it

A table needs no network of yours. One estimator predicts, with intervals that hold what they
promise; another one shows what it has learned, column by column.
"""

# %%
# The table is that of 442 patients with diabetes: age, sex, body mass index, blood pressure and
# six blood values, and how far the disease had progressed a year later. A hundred rows are kept
# for the end.

from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

from pyro_dak import DAKAdditiveRegressor, DAKRegressor

EPOCHS = 100
LEVEL = 4
table, progress = load_diabetes(return_X_y=True, as_frame=True, scaled=False)
table["sex"] = table["sex"].map({1: "1", 2: "2"})  # text is a category
parts = train_test_split(table, progress, test_size=100, random_state=0)
X, X_new, y, y_new = parts

networks = DAKRegressor(epochs=EPOCHS, random_state=0, progress=False).fit(X, y)
intervals = networks.predict_interval(X_new, level=0.9)
inside = (y_new > intervals[:, 0]) & (y_new < intervals[:, 1])
rmse = float(((networks.predict(X_new) - y_new) ** 2).mean() ** 0.5)
print(f"RMSE {rmse:.1f}; 90 % intervals hold {inside.mean():.0%} of {len(X_new)} new rows")

# %%
# Five networks with last layers of this kind stand behind `DAKRegressor`. `DAKAdditiveRegressor`
# has none: its prediction is a sum of one function for each column, with an exact band.

additive = DAKAdditiveRegressor(level=LEVEL).fit(X, y)
additive_rmse = float(((additive.predict(X_new) - y_new) ** 2).mean() ** 0.5)
strongest = sorted(zip(additive.importances_, additive.term_names_, strict=True), reverse=True)
print(f"RMSE {additive_rmse:.1f};", ", ".join(f"{name} {size:.0f}" for size, name in strongest[:4]))

# %% [figure] Left: intervals of new rows. Right: the functions of three columns with their bands.

import matplotlib.pyplot as plt

figure, axes = plt.subplots(1, 4, figsize=(9, 2.9), width_ratios=(1.7, 1, 1, 1))
order = networks.predict(X_new).argsort()
for i, row in enumerate(order):
    color = "C0" if inside.iloc[row] else "C1"
    axes[0].plot([i, i], intervals[row], color=color, lw=1, alpha=0.45)
    axes[0].plot(i, y_new.iloc[row], ".", color=color, ms=4)
axes[0].set(title="90 % intervals of new rows", xlabel="rows, by prediction", ylabel="progress")
curves = [name for _, name in strongest if name != "sex"][:3]
for ax, name in zip(axes[1:], curves, strict=True):
    shape = additive.shape_function(name)
    ax.axhline(0, color="C5", lw=0.6)
    ax.fill_between(shape.grid, shape.lower, shape.upper, color="C2", alpha=0.2, lw=0)
    ax.plot(shape.grid, shape.mean, color="C2")
    ax.plot(X[name], [-95] * len(X), "|", color="C5", ms=5, alpha=0.3)
    ax.set(ylim=(-100, 140), xlabel=name)
axes[1].set(title="what a column adds, 95 % band")

# %%
# All of this is on one page of HTML that needs no network and no script, for someone who will
# never open Python. From a shell, `pyro-dak fit train.csv --target progress --additive --out
# model/` and `pyro-dak explain model/ test.csv --out page.html` write it; in Python it is

from pathlib import Path

from pyro_dak.tables.explain import additive_page

page = additive_page(additive, X_new, y_new, title="Diabetes", target="progress", row=3)
Path("diabetes.html").write_text(page, encoding="utf-8")

# %%
# <iframe class="framed" src="diabetes.html" title="The page of the model"></iframe>
# <p><a href="diabetes.html">Open the page by itself.</a></p>

# %% [check]

assert 0.8 <= inside.mean() <= 0.99
assert rmse < 0.85 * y_new.std()
assert additive_rmse < 0.85 * y_new.std()
assert {"bmi", "s5"} <= {name for _, name in strongest[:4]}

# %%
# **Read next:** [tables and the command line](../tables.md), with missing cells, categories and
# dates; [additive models](../additive.md), with pairs of columns and a comparison with other
# additive models.
